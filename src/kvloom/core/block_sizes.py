"""Bytes of one plane's block under each codec, side data included: (dim, tokens in block) -> bytes. No torch.

The fields behind these bytes are in ``docs/codecs.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

BlockBytes = Callable[[int, int], int]

GGML_GROUP = 32
KIVI_VALUE_GROUP = 32


def ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def codes(bits: int, dim: int, tokens: int) -> int:
    """Bytes of ``bits``-bit codes, each token's row padded to whole bytes."""
    return ceil(bits * dim, 8) * tokens


def token_scaled(bits: int, side_bytes: int) -> BlockBytes:
    return lambda dim, tokens: codes(bits, dim, tokens) + side_bytes * tokens


def ggml(group_bytes: int) -> BlockBytes:
    return lambda dim, tokens: ceil(dim, GGML_GROUP) * group_bytes * tokens


def kivi_key(bits: int) -> BlockBytes:
    return lambda dim, tokens: codes(bits, dim, tokens) + 4 * dim


def kivi_value(bits: int) -> BlockBytes:
    return lambda dim, tokens: codes(bits, dim, tokens) + 4 * ceil(dim, KIVI_VALUE_GROUP) * tokens


def kvquant(bits: int, token_side_bytes: int) -> BlockBytes:
    return lambda dim, tokens: (
        codes(bits, dim, tokens) + 4 * ceil(dim * tokens, 100) + token_side_bytes * tokens
    )  # 1 % outliers, each an fp16 value and a 16-bit index


def split(bits: int) -> BlockBytes:
    def block_bytes(dim: int, tokens: int) -> int:
        wide = 8 * (dim // 32)  # a quarter, in whole bytes of codes
        return ceil(wide * (bits + 1) + (dim - wide) * bits, 8) * tokens + 4 * tokens

    return block_bytes


def kvarn_key(bits: int) -> BlockBytes:
    return lambda dim, tokens: codes(bits, dim, tokens) + 2 * (2 * dim + tokens)


def kvarn_value(bits: int) -> BlockBytes:
    return lambda dim, tokens: codes(bits, dim, tokens) + 2 * (2 * tokens + dim)


# Plane format -> its bytes, of every codec that the engine has.
SERVED_BLOCK_BYTES: Mapping[str, BlockBytes] = {
    "fp8": token_scaled(8, 2),
    "fp8_e5m2": token_scaled(8, 2),
    "int8": token_scaled(8, 2),
    "int4": token_scaled(4, 4),
    "q8_0": ggml(34),
    "q4_0": ggml(18),
    "kivi4.key": kivi_key(4),
    "kivi4.value": kivi_value(4),
    "kivi2.key": kivi_key(2),
    "kivi2.value": kivi_value(2),
    "turboquant4": token_scaled(4, 2),
    "turboquant3": token_scaled(3, 2),
    "turboquant2": token_scaled(2, 2),
    "turboquant4.prod": token_scaled(4, 4),
    "turboquant3.prod": token_scaled(3, 4),
    "turboquant2.prod": token_scaled(2, 4),
    "kvarn4.key": kvarn_key(4),
    "kvarn4.value": kvarn_value(4),
    "kvarn2.value": kvarn_value(2),
    "kvquant4.key": kvquant(4, 0),
    "kvquant4.value": kvquant(4, 4),
    "kvquant3.key": kvquant(3, 0),
    "kvquant3.value": kvquant(3, 4),
    "kvquant2.key": kvquant(2, 0),
    "kvquant2.value": kvquant(2, 4),
    "turboquant3.5": split(3),
    "turboquant2.5": split(2),
    "loom4": token_scaled(4, 2),
    "loom3": token_scaled(3, 2),
    "loom2": token_scaled(2, 2),
}
