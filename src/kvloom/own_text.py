"""Text that a model writes itself, to calibrate it on: no corpus, and nobody's test texts.

Sampled at temperature 1 a model's text is spread over what it knows. Half of the pieces continue an
empty document, half an empty first message of a chat, if the model has a chat template: what comes
after the end of a text or turn is the next one, so pieces hold several of both.
"""

from __future__ import annotations

from typing import Any

import torch

from kvloom.core.errors import RequestError
from kvloom.core.request import SamplingParams
from kvloom.llm import LLM

PIECE = 1024  # tokens written in one go: longer ones drift
DOCUMENT_START = "<|endoftext|>"  # where a vocabulary has it; else the tokenizer's first or last special token
MARK = "@@"


def write_windows(llm: LLM, count: int, length: int, *, seed: int = 0) -> list[torch.Tensor]:
    """``count`` windows of at most ``length`` tokens, int64 [T] each: pieces one after the other.

    The same for the same seed, on the same kind of machine. Shows a bar on a terminal.

    Raises:
        RequestError: the tokenizer has no token that a text begins with.
    """
    length = min(length, llm.info.max_model_len)
    starts = _starts(llm.tokenizer)
    piece = min(PIECE, llm.info.max_model_len - max(len(start) for start in starts))
    pieces = -(-count * length // piece)
    pieces += -pieces % len(starts)
    prompts = [start for start in starts for _ in range(pieces // len(starts))]
    params = [
        SamplingParams(max_tokens=piece, min_tokens=piece, ignore_eos=True, seed=seed + index)
        for index in range(pieces)
    ]
    written = [one.prompt_token_ids + one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    share = pieces // len(starts)
    mixed = torch.tensor([token for i in range(share) for part in written[i::share] for token in part])
    return list(mixed[: count * length].reshape(count, length))


def _starts(tokenizer: Any) -> list[list[int]]:
    """What an empty document and an empty first message begin with."""
    first = tokenizer.get_vocab().get(DOCUMENT_START, tokenizer.bos_token_id)
    if first is None:
        first = tokenizer.eos_token_id
    starts = [] if first is None else [[first]]
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        head = tokenizer(text.split(MARK)[0], add_special_tokens=False)["input_ids"]
        starts += [head] if head else []
    if not starts:
        raise RequestError("the tokenizer knows no token that a text begins with; name a text to calibrate on")
    return starts
