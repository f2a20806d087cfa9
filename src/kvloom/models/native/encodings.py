"""How a native step reads the encoded blocks of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from kvloom import _cpu
from kvloom.attention.batch import KVStore
from kvloom.kernels.coded import native_codes, query_turns, removed_means
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import PlaneFormat


class Encodings:
    """Per layer group of ``store``, what ``_cpu.Step`` must know of its encoded blocks; empty where none are.

    Args:
        query_heads: by layer group.
        capped: layer groups whose logits have a softcap.

    Attributes:
        decoded: layer groups whose encoded blocks PyTorch decodes before they are read, and why.
    """

    def __init__(
        self, store: KVStore, backend: CpuBackend, query_heads: Mapping[int, int], capped: Collection[int]
    ) -> None:
        self.store = store
        self.decoded: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # held by address
        self.native: list[_cpu.Encoding] = []
        if all(item.twin is None for item in store.storage):
            return
        for item in store.storage[: len(store.layout.groups)]:
            if item.twin is None:
                self.native.append(_cpu.Encoding(-1, False, 0, 0, 0, False, 0, 0, None))
                continue
            assert item.recents is not None
            fmt = store.formats[item.twin]
            encoder = backend.block_encoder(store.formats[item.home], fmt)
            reason = backend.unread(fmt, query_heads[item.home], capped=item.home in capped)
            if reason is not None:
                self.decoded[item.home] = reason
                self.native.append(_cpu.Encoding(item.twin, True, item.sinks, item.recents, 0, False, 0, 0, encoder))
                continue
            key, value = fmt.planes
            by_head = query_turns(key, fmt.layers)
            query_turn, output_turn = _turn(key) if by_head is None else by_head, _turn(value)
            self.native.append(
                _cpu.Encoding(
                    item.twin,
                    False,
                    item.sinks,
                    item.recents,
                    self._address(query_turn),
                    by_head is not None,
                    self._address(None if output_turn is None else output_turn.T),
                    self._address(removed_means(key, fmt.layers)),
                    encoder,
                )
            )

    def _address(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()


def _turn(plane: PlaneFormat) -> torch.Tensor | None:
    codes = native_codes(plane)
    return None if codes is None else codes.turn
