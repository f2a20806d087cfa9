"""A Hugging Face tokenizer from a GGUF file's metadata.

GGUF keeps vocabulary, merges, scores and token types under ``tokenizer.ggml.*``, and names the rule
that splits text before merging. Byte-level BPE ("gpt2") needs that rule by name; sentencepiece BPE
("llama") carries scores instead of merges, from which the merges follow.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from kvloom.core.errors import CorruptModelError, UnsupportedModelError

_SPACE = "\u2581"  # sentencepiece writes a space as this character
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(metadata: dict[str, Any], architecture: str) -> Tokenizer:
    """The tokenizer that ``metadata`` describes.

    Raises:
        UnsupportedModelError: a tokenizer or splitting rule that is not known here.
        CorruptModelError: the vocabulary is missing.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CorruptModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens); use a complete file")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, scored=not architecture.startswith("gemma"))
    else:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of type {kind!r}; converted are gpt2 and llama; "
            "use the model's safetensors directory instead"
        )
    _add_whole_tokens(tokenizer, metadata, tokens)
    _add_bos(tokenizer, metadata, tokens, default=kind == "llama")
    return tokenizer


def special_token(metadata: dict[str, Any], key: str) -> str | None:
    """The text of the token that ``tokenizer.ggml.<key>`` numbers."""
    number = metadata.get(f"tokenizer.ggml.{key}")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _splits(rule: str) -> list[PreTokenizer] | None:
    """How text is split before the byte-level alphabet; None for an unknown rule."""
    by_regex = {
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    }
    if rule in by_regex:
        return [
            pre_tokenizers.Split(Regex(by_regex[rule]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if rule == "smollm":
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    if rule == "gpt-2":
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    return None


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "")
    splits = _splits(rule)
    if splits is None:
        raise UnsupportedModelError(
            f"the GGUF file splits text by rule {rule!r}, which is not known here; "
            "use the model's safetensors directory instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            # Llama 3's vocabulary holds whole words that its merges do not reach.
            ignore_merges=rule in ("llama3", "llama-v3", "llama-bpe"),
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], *, scored: bool) -> Tokenizer:
    """``scored``: merges rank by token score; otherwise by token number (Gemma's scores are not its ranks)."""
    # Files spell tokens made of several spaces with real ones; the normalizer turns text's into _SPACE.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: number for number, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores", [])
    if scored and len(scores) != len(tokens):
        raise CorruptModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores; use a complete file")
    rank = {token: (-scores[number] if scored else number) for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, rank),
            unk_token=special_token(metadata, "unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", scored))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocab: dict[str, int], rank: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best rank first."""
    found = []
    for token in vocab:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((rank[token], len(left), len(right), vocab[left], vocab[right], left, right))
    found.sort(key=lambda entry: entry[:5])
    return [(entry[5], entry[6]) for entry in found]


def _add_whole_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole in the text."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    vocab = tokenizer.get_vocab()
    control, whole = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED and token in vocab:
            whole.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(whole)


def _add_bos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, default: bool) -> None:
    """llama.cpp's rule: a sentencepiece vocabulary starts a text with BOS unless the file says otherwise."""
    bos = special_token(metadata, "bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
    )
