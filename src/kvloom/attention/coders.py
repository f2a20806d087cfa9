"""The codecs of an engine: made once per plane, in the byte order that its backend reads."""

from __future__ import annotations

from kvloom.attention.formats import MakeCoder
from kvloom.codecs import make_codec
from kvloom.codecs.base import BlockCodec
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.kernel_layout import for_kernels
from kvloom.codecs.rope import RopeTable
from kvloom.core.errors import CodecError
from kvloom.kernels.ops import BlockCoder, KernelBackend


def coder_maker(backend: KernelBackend, calibration: Calibration | None, rope: RopeTable | None) -> MakeCoder:
    """Makes codecs for ``block_formats``; it raises CodecError for what does not fit the plane."""

    def make(name: str, plane: str, dim: int, block_size: int) -> BlockCoder:
        codec = make_codec(name, plane, dim, block_size, calibration, rope)
        if plane == "latent" and not codec.token_local:
            raise CodecError(
                f"codec {name} scales channels over a block, and a latent is key and value at once: its error would "
                "enter both; use a codec with scales per token for it, such as int8 or turboquant4"
            )
        # A byte of one-bit codes holds eight pairs of tokens: shorter blocks have no order for kernels.
        if backend.name == "cpu" and isinstance(codec, BlockCodec) and block_size >= 16:
            return for_kernels(codec) or codec
        return codec

    return make
