"""Runs a model in float32 whatever its weights are stored in, one module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within, each module's own weights are float32 while it computes and as they were afterwards.

    For checks at load: CPUs without 16-bit products run such layers tens of times slower than float32
    ones, and rounding to 16 bits would hide small mistakes. Memory grows by one module's weights.
    """
    stored: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def widen(module: nn.Module, _args: Any) -> None:
        halves = {name: p for name, p in module._parameters.items() if p is not None and p.dtype != torch.float32}
        stored[module] = halves
        for name, parameter in halves.items():
            module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def restore(module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters.update(stored.pop(module, {}))

    hooks = []
    for module in model.modules():
        if any(p is not None and p.is_floating_point() for p in module._parameters.values()):
            hooks.append(module.register_forward_pre_hook(widen))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, halves in stored.items():  # a forward pass that raised halfway
            module._parameters.update(halves)
