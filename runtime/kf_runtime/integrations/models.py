"""Patches of Boltz, OpenFold3 and Protenix: the ``forward`` of their triangle multiplication layers.

Each patched forward reads the layer at every call; a layer that ``layers.read`` declines runs the
package's own forward. OpenFold3 and Protenix round float32 parameters to the pair's dtype in each
Linear; the patched forward does the same with torch's casts, at each call, with no copy kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kf_runtime.integrations.layers import BOLTZ, FUSED, SPLIT, Declined, Served, read, serve
from kf_runtime.integrations.patching import Patches

Forward = Callable[..., Any]


def patch_boltz(patches: Patches) -> None:
    """``TriangleMultiplicationOutgoing`` and ``...Incoming`` of ``boltz.model.layers.triangular_mult``."""
    from boltz.model.layers import triangular_mult

    for direction in ("outgoing", "incoming"):
        owner = getattr(triangular_mult, f"TriangleMultiplication{direction.title()}")
        patches.put(owner, "forward", _boltz(owner.forward, direction))


def _boltz(original: Forward, direction: str) -> Forward:
    @functools.wraps(original)
    def forward(self: nn.Module, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Any:
        found = read(self, BOLTZ, direction)
        if isinstance(found, Declined):
            return original(self, x, mask, use_kernels)
        return serve(found, x, mask, cast=False)

    forward.kf_read = lambda layer: read(layer, BOLTZ, direction)  # type: ignore[attr-defined]
    forward.kf_original = original  # type: ignore[attr-defined]
    return forward


def patch_openfold3(patches: Patches) -> None:
    """Both update layers of ``openfold3.core.model.layers.triangular_multiplicative_update``."""
    from openfold3.core.model.layers import triangular_multiplicative_update as module

    patches.put(module.TriangleMultiplicativeUpdate, "forward", _openfold(module.TriangleMultiplicativeUpdate, SPLIT))
    fused = module.FusedTriangleMultiplicativeUpdate
    patches.put(fused, "forward", _openfold(fused, FUSED))


def patch_protenix(patches: Patches) -> None:
    """``TriangleMultiplicativeUpdate`` of ``protenix.model.triangular.triangular``."""
    from protenix.model.triangular import triangular

    owner = triangular.TriangleMultiplicativeUpdate
    patches.put(owner, "forward", _openfold(owner, SPLIT))


def _openfold(owner: Any, parts: Mapping[str, tuple[str, ...]]) -> Forward:
    original: Forward = owner.forward
    combine = owner._combine_projections

    def reader(layer: Any) -> Served | Declined:
        if type(layer)._combine_projections is not combine:
            return Declined(reason="_combine_projections: overridden; expected the package's own contraction")
        direction = "outgoing" if getattr(layer, "_outgoing", True) else "incoming"
        return read(layer, parts, direction)

    @functools.wraps(original)
    def forward(
        self: nn.Module,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        *args: Any,
        _add_with_inplace: bool = False,
        **kwargs: Any,
    ) -> Any:
        found = reader(self)
        if isinstance(found, Declined) or args or (inplace_safe and torch.is_grad_enabled()):
            return original(self, z, mask, inplace_safe, *args, _add_with_inplace=_add_with_inplace, **kwargs)
        update = serve(found, z, mask, cast=True)
        return z.add_(update) if inplace_safe and _add_with_inplace else update

    forward.kf_read = reader  # type: ignore[attr-defined]
    forward.kf_original = original  # type: ignore[attr-defined]
    return forward
