"""What codecs learn about one model beforehand: means, ranges and levels, per layer, head and channel.

A calibration is a safetensors file bound to the model's weights. Its tensors are named ``KIND.LAYER``;
``KINDS`` says what each kind holds. ``kvloom.codecs.calibrate`` makes one from collected keys and values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvloom.core.errors import CodecError

FORMAT = "kvloom-calibration-1"

# kind -> its shape, in words; all float32, kept as float16 where HALVES says so. H: KV heads, d: the plane's width.
KINDS: Mapping[str, str] = {
    "key_mean": "[H, d] mean of keys after RoPE",
    "value_mean": "[H, d] mean of values",
    "key_square": "[H, d] variance of keys after RoPE about key_mean",
    "value_square": "[H, d] variance of values about value_mean",
    "query_square": "[H, d] mean square of the queries that read the head, after RoPE",
    "key_basis": "[H, d, d] directions of keys after RoPE, the most important first (key_basis.py)",
    "key_importance": "[H, d] variance of keys along each of them, errors weighing the same",
    "raw_key_low": "[H, d] 0.5 % percentile of keys before RoPE",
    "raw_key_high": "[H, d] 99.5 % percentile of keys before RoPE",
    "key_levels4": "[2, 16] levels of normalised keys before RoPE: to choose codes by, to decode with",
    "key_levels3": "[2, 8] likewise",
    "key_levels2": "[2, 4] likewise",
    "value_levels4": "[2, 16] levels of normalised values, likewise",
    "value_levels3": "[2, 8] likewise",
    "value_levels2": "[2, 4] likewise",
}
HALVES = {"key_basis"}  # large, and rounded to float16 before it is used at all


class Calibration:
    """Tensors by kind and layer. ``digest`` identifies their content."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, weights_digest: str, about: Mapping[str, str] | None = None
    ) -> None:
        self.tensors = {name: tensor.to(torch.float32).cpu().contiguous() for name, tensor in sorted(tensors.items())}
        self.weights_digest = weights_digest
        self.about = dict(about or {})
        for name, tensor in self.tensors.items():
            kind, _, layer = name.partition(".")
            if kind not in KINDS or not layer.isdigit():
                raise CodecError(f"a calibration holds no tensor called {name!r}; known kinds: {', '.join(KINDS)}")
            if not bool(torch.isfinite(tensor).all()):
                raise CodecError(f"calibration tensor {name} has values that are not finite; calibrate again")
        self.digest = self._digest()

    def get(self, kind: str, layer: int, shape: tuple[int | None, ...]) -> torch.Tensor:
        """The tensor ``kind`` of ``layer``, whose shape must match where ``shape`` is not None.

        Raises:
            CodecError: it is not in this calibration, or has another shape.
        """
        tensor = self.tensors.get(f"{kind}.{layer}")
        if tensor is None:
            raise CodecError(
                f"the calibration has no {kind} of layer {layer} ({KINDS.get(kind, 'unknown kind')}); make it again "
                "with kvloom calibrate, for this model and codec"
            )
        fits = tensor.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            raise CodecError(
                f"the calibration's {kind} of layer {layer} has shape {tuple(tensor.shape)}; the plane needs "
                f"{tuple('any' if want is None else want for want in shape)}. It was made for another model"
            )
        return tensor

    def save(self, path: Path) -> None:
        """Write the file, replacing one that is there."""
        about = {"format": FORMAT, "weights_digest": self.weights_digest, "digest": self.digest}
        temporary = path.with_name(path.name + ".part")
        stored = {name: x.half() if name.partition(".")[0] in HALVES else x for name, x in self.tensors.items()}
        save_file(stored, temporary, metadata={**about, "about": json.dumps(self.about, sort_keys=True)})
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, *, weights_digest: str | None = None) -> Calibration:
        """Read ``path``; with ``weights_digest``, insist that it was made from those weights.

        Raises:
            CodecError: missing, damaged, of another format or of another model.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except FileNotFoundError as error:
            raise CodecError(f"there is no calibration file {path}; make one with kvloom calibrate") from error
        except (SafetensorError, OSError) as error:
            raise CodecError(f"calibration file {path} cannot be read ({error}); make it again") from error
        if about.get("format") != FORMAT:
            raise CodecError(
                f"{path} has format {about.get('format')!r}, expected {FORMAT!r}; make it again with kvloom calibrate"
            )
        made_for = about.get("weights_digest", "")
        if weights_digest is not None and made_for != weights_digest:
            raise CodecError(
                f"{path} was calibrated for weights {made_for[:12]}…, but the model has {weights_digest[:12]}…; "
                "calibrate this model"
            )
        found = cls(tensors, weights_digest=made_for, about=json.loads(about.get("about", "{}")))
        if found.digest != about.get("digest"):
            raise CodecError(f"calibration file {path} is damaged (its content has another digest); make it again")
        return found

    def _digest(self) -> str:
        joined = hashlib.sha256(FORMAT.encode())
        joined.update(self.weights_digest.encode())
        for name, tensor in self.tensors.items():
            joined.update(f"{name}:{tuple(tensor.shape)};".encode())
            joined.update(tensor.numpy().tobytes())
        return joined.hexdigest()[:16]
