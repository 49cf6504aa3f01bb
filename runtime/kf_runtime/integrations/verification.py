"""verify: a patched layer against its own unpatched forward, on inputs and parameters that prove something."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kf_runtime import dispatch
from kf_runtime.errors import ArgumentError
from kf_runtime.integrations.layers import Declined

#: Relative Frobenius tolerance by the pair's dtype: BF16 rounds h, a, b, t and y.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What ``verify`` found. ``error`` is relative to the norm of the layer's own output, which is ``norm``.

    ``served`` says that our op computes this layer; else ``reason`` says why it keeps its own forward.
    ``kernels`` is how many calls of the comparison ran KF kernels.
    """

    served: bool
    reason: str
    error: float
    tolerance: float
    norm: float
    kernels: int

    @property
    def ok(self) -> bool:
        """The outputs agree, and are not both zero."""
        return self.norm > 0 and self.error <= self.tolerance


@torch.no_grad()
def verify(layer: nn.Module, pair: Tensor | None = None, mask: Tensor | None = None, *, seed: int = 0) -> Verification:
    """Compare a layer of a patched class with its own forward, on a copy whose parameters are all random.

    (Fresh layers zero their last projection; equality of zeros proves nothing.) ``pair`` defaults to a
    random ``[1, 33, 33, C]`` in the dtype of the layer's parameters. Raises ArgumentError for a layer
    whose class ``install`` has not patched.
    """
    patched = getattr(type(layer), "forward", None)
    original = getattr(patched, "kf_original", None)
    if original is None:
        raise ArgumentError("layer", expected="a layer of a class that install() patched", found=type(layer).__name__)
    trial = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(seed)
    for parameter in trial.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        noise = torch.randn(parameter.shape, generator=generator) * scale + (1.0 if parameter.dim() == 1 else 0.0)
        parameter.copy_(noise)
    if pair is None:
        pair = _pair(trial, generator)
    if mask is None:
        mask = (torch.rand(pair.shape[:-1], generator=generator) > 0.1).to(pair)
    found = patched.kf_read(trial)  # type: ignore[union-attr]
    before = _hits()
    ours = trial(pair.clone(), mask)
    kernels = _hits() - before
    theirs: Any = original(trial, pair.clone(), mask)
    norm = float(theirs.float().norm())
    error = float((ours.float() - theirs.float()).norm()) / max(norm, 1e-30)
    return Verification(
        served=not isinstance(found, Declined),
        reason=found.reason if isinstance(found, Declined) else "",
        error=error,
        tolerance=TOLERANCE[pair.dtype],
        norm=norm,
        kernels=kernels,
    )


def _pair(layer: nn.Module, generator: torch.Generator) -> Tensor:
    first = next(p for p in layer.parameters() if p.dim() == 1)
    return torch.randn((1, 33, 33, first.shape[0]), generator=generator).to(first)


def _hits() -> int:
    return sum(executor.calls for executor in dispatch.current().executors())
