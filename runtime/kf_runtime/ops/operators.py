"""The torch.library operator ``kf::triangle_multiplicative_update``: schema, fake, kernels, autograd, vmap.

A compiled graph of an admitted shape calls it; eager calls do not pass through it. Its result is
fresh and row-major, in the fake and for real. Where a gradient or a tangent may be asked for, the
Autograd kernel runs the plain formula, so that every derivative is plain torch's own.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kf_runtime.ops.trimul_arguments import PARAMETERS, Arguments, Precision, TriMulPrecision, check

SCHEMA: Final = (
    "triangle_multiplicative_update(Tensor x, str direction, Tensor? mask, "
    "Tensor? norm_in_weight, Tensor? norm_in_bias, Tensor p_in_weight, Tensor? p_in_bias, "
    "Tensor g_in_weight, Tensor? g_in_bias, Tensor? norm_out_weight, Tensor? norm_out_bias, "
    "Tensor p_out_weight, Tensor? p_out_bias, Tensor g_out_weight, Tensor? g_out_bias, "
    "float eps, str? precision) -> Tensor"
)
QUALIFIED: Final = "kf::triangle_multiplicative_update"
TENSORS: Final = ("x", "mask", *PARAMETERS)


def spell(precision: Precision) -> str | None:
    """A precision as the operator's schema has it: None, "bfloat16", or the name of a TriMulPrecision."""
    return precision if precision is None or isinstance(precision, str) else str(precision.name)


def call_of(x: Tensor, direction: str, mask: Tensor | None, *rest: Any) -> Arguments:
    """The record of an operator call, from its positional arguments. Raises ArgumentError."""
    *parameters, eps, text = rest
    precision: Precision = text if text is None or text == "bfloat16" else TriMulPrecision[text]
    named: dict[str, Any] = dict(zip(PARAMETERS, parameters, strict=True))
    call = Arguments(x=x, direction=direction, mask=mask, eps=eps, precision=precision, **named)
    check(call)
    return call


def operands(call: Arguments) -> tuple[Any, ...]:
    """The operator's positional arguments for a call; the inverse of ``call_of``."""
    parameters = [getattr(call, name) for name in PARAMETERS]
    return (call.x, call.direction, call.mask, *parameters, float(call.eps), spell(call.precision))


def _real(*args: Any) -> Tensor:
    from kf_runtime.ops import trimul_kf
    from kf_runtime.ops.triangle_multiplicative_update import generic

    with torch.no_grad():
        call = call_of(*args)
        answer = trimul_kf.attempt(call)
        return answer if isinstance(answer, Tensor) else generic(call).contiguous()


def _fake(*args: Any) -> Tensor:
    x = call_of(*args).x
    return x.new_empty(x.shape)


def _autograd(*args: Any) -> Tensor:
    from kf_runtime.ops.trimul_hot import dual

    if dual() or (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)):
        from kf_runtime.ops.trimul_formula import formula

        return formula(call_of(*args)).contiguous()
    with torch._C._AutoDispatchBelowAutograd():
        answer: Tensor = OPERATOR(*args)
        return answer


def _vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """A batch of pairs is one more leading dimension; a batch of parameters is a loop."""
    pair = (0, 2)
    if any(dim is not None for place, dim in enumerate(dims) if place not in pair):
        slices = [
            OPERATOR(*[a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)])
            for i in range(info.batch_size)
        ]
        return torch.stack(slices), 0
    moved = list(args)
    for place in pair:
        if args[place] is not None:
            dim = dims[place]
            moved[place] = (
                args[place].expand(info.batch_size, *args[place].shape) if dim is None else args[place].movedim(dim, 0)
            )
    return OPERATOR(*moved), 0


def _register() -> Any:
    library: Any = torch.library.Library("kf", "DEF")  # type: ignore[no-untyped-call]
    library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("triangle_multiplicative_update", _real, "CompositeExplicitAutograd")
    library.impl("triangle_multiplicative_update", _autograd, "Autograd")
    torch.library.register_fake(QUALIFIED, _fake, lib=library)
    torch.library.register_vmap(QUALIFIED, _vmap, lib=library)
    return library


_LIBRARY: Final = _register()
OPERATOR: Final = torch.ops.kf.triangle_multiplicative_update.default
