"""Small tokenizers of the kinds that language models use, built in a moment."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(a, b):\n    return a + b\n",
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null}',
    "Größe, naïve café; 你好，世界。 😀👍🏽 日本語テキスト",
    "Stop. END. ### Human: hello there ### Assistant: hi",
]


def _wrap(backend: Tokenizer) -> Any:
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("ÿ\u2581x", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def byte_level() -> Any:
    """As GPT-2, Llama 3, Qwen and SmolLM: byte-pair encoding over bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(LINES * 3, trainer)
    return _wrap(backend)


def _sentencepiece(decoder: Any) -> Any:
    pieces = sorted({c for line in LINES[:3] for c in line.replace(" ", "▁")} | {"▁the", "▁dog", "▁▁", "ö", "你", "\n"})
    vocabulary = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocabulary)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    return _wrap(backend)


@cache
def byte_fallback() -> Any:
    """As Gemma: SentencePiece pieces, bytes for what they lack."""
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def byte_fallback_strip() -> Any:
    """As Llama 2 and Mistral: the text's first space is dropped."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


@cache
def metaspace() -> Any:
    """As T5: a decoder that is decoded in a window."""
    return _sentencepiece(decoders.Metaspace(replacement="▁", prepend_scheme="always"))


@cache
def word_piece() -> Any:
    """As BERT: spaces between words, none before ``##``; decoded in a window."""
    words = ["the", "dog", "##s", "sleep", "##ing", "你", "fox", ",", "."]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(backend)
