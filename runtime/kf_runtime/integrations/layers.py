"""Layers: the op's arguments from another package's layer, or why the layer keeps its own forward.

A layer is served only where everything that its forward does is known: the exact classes of its
parts, no hooks, one eps, plain precision. Anything else is declined, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from kf_runtime.ops.triangle_multiplicative_update import triangle_multiplicative_update
from kf_runtime.ops.trimul_split import concatenated


@dataclass(frozen=True, kw_only=True)
class Served:
    """A layer that our op computes: direction, eps, and parameters by the op's names."""

    direction: str
    eps: float
    parameters: dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Declined:
    """A layer that keeps its own forward."""

    reason: str


#: The op's parts to the attributes of Boltz's layers, and of OpenFold's with split and fused projections.
BOLTZ: Final[Mapping[str, tuple[str, ...]]] = {
    "norm_in": ("norm_in",), "p_in": ("p_in",), "g_in": ("g_in",),
    "norm_out": ("norm_out",), "p_out": ("p_out",), "g_out": ("g_out",),
}  # fmt: skip
SPLIT: Final[Mapping[str, tuple[str, ...]]] = {
    "norm_in": ("layer_norm_in",), "p_in": ("linear_a_p", "linear_b_p"), "g_in": ("linear_a_g", "linear_b_g"),
    "norm_out": ("layer_norm_out",), "p_out": ("linear_z",), "g_out": ("linear_g",),
}  # fmt: skip
FUSED: Final[Mapping[str, tuple[str, ...]]] = {**SPLIT, "p_in": ("linear_ab_p",), "g_in": ("linear_ab_g",)}
LINEAR_CLASSES: Final = ("Linear", "OpenfoldLinear")
NORM_CLASSES: Final = ("LayerNorm", "OpenFoldLayerNorm")
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read(layer: nn.Module, parts: Mapping[str, tuple[str, ...]], direction: str) -> Served | Declined:
    """The op's arguments of a layer whose parts are at these attributes."""
    parameters: dict[str, Tensor | None] = {}
    eps: set[float] = set()
    for part, names in parts.items():
        modules: list[Any] = [getattr(layer, name, None) for name in names]
        refusal = _refusal(part, names, modules)
        if refusal is not None:
            return Declined(reason=refusal)
        if part.startswith("norm"):
            eps.add(float(modules[0].eps))
        for kind in ("weight", "bias"):
            values = [getattr(module, kind) for module in modules]
            if len({value is None for value in values}) > 1:
                return Declined(reason=f"{', '.join(names)}: {kind}: expected all or none; found some")
            joined = values[0] if len(values) == 1 or values[0] is None else concatenated(values)
            parameters[f"{part}_{kind}"] = joined
    if len(eps) != 1:
        return Declined(reason=f"eps: expected one for both LayerNorms; found {sorted(eps)}")
    return Served(direction=direction, eps=eps.pop(), parameters=parameters)


def _refusal(part: str, names: tuple[str, ...], modules: list[Any]) -> str | None:
    classes = NORM_CLASSES if part.startswith("norm") else LINEAR_CLASSES
    for name, module in zip(names, modules, strict=True):
        if not isinstance(module, nn.Module) or type(module).__name__ not in classes:
            return f"{name}: expected a {' or '.join(classes)}; found {type(module).__name__}"
        if getattr(module, "precision", None) is not None:
            return f"{name}: precision: expected None; found {module.precision}"
        if any(getattr(module, hooks, None) for hooks in _HOOKS) or "parametrizations" in module._modules:
            return f"{name}: expected no hooks or parametrizations; found some"
        shape = getattr(module, "normalized_shape", None)
        if shape is not None and len(shape) != 1:
            return f"{name}: normalized_shape: expected one dimension; found {tuple(shape)}"
    return None


def serve(found: Served, pair: Tensor, mask: Tensor | None, *, cast: bool) -> Tensor:
    """The update. ``cast``: the package rounds its parameters to a 16-bit pair's dtype at each call, and so do we."""
    if mask is not None and _stretches(mask, pair):
        mask = mask.expand(pair.shape[:-1]).contiguous()  # kernels take dense masks
    parameters: dict[str, Any] = dict(found.parameters)
    if cast and pair.dtype in (torch.bfloat16, torch.float16):
        parameters = {name: None if v is None else v.to(pair.dtype) for name, v in parameters.items()}
    return triangle_multiplicative_update(pair, found.direction, mask, **parameters, eps=found.eps)


def _stretches(mask: Tensor, pair: Tensor) -> bool:
    """Whether the mask is smaller than the pair and broadcasts to it, as in the packages' own products."""
    wanted = pair.shape[:-1]
    if mask.shape == wanted or mask.dim() > len(wanted):
        return False
    sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
    return all(size in (1, full) for size, full in sizes)
