"""The kernel path of triangle_multiplicative_update: which calls reach KF, and the call itself.

A call reaches KF when it needs no gradient, is not traced, and has a BF16 pair with BF16 or float32
parameters, or is float32 throughout with precision="bfloat16" (the pair is cast first, the result
back). Float32 parameters are rounded to BF16 within each call (``rounding``). Decisions:

- A BF16 pair with float32 parameters runs only where the cell's accuracy with such parameters was
  admitted, and where the caller did not ask for float32 products (TF32, TF32x3, IEEE). With
  precision="bfloat16" the rounding is what was asked for: the call is the BF16 cell.

- BF16 autocast changes nothing for a BF16 pair: the LayerNorms compute in float32 from the same BF16
  values either way. Under autocast of another dtype the call is declined.
- A Boolean, integer or float mask is rounded to BF16 first, as the formula does.
- With BF16 parameters every TriMulPrecision is served: products of BF16 operands are exact and
  accumulate in float32.
- All twelve norm and projection tensors must be given; biases of the projections all or none.
"""

from __future__ import annotations

import functools
from math import prod
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from kf_runtime import dispatch
from kf_runtime.campaign import Mode
from kf_runtime.cell import Cell
from kf_runtime.dispatch import Dispatcher
from kf_runtime.ops import trimul_hot
from kf_runtime.ops.trimul_arguments import PARAMETERS, Arguments, TriMulPrecision, address_of, check
from kf_runtime.ops.trimul_hot import BIASES, EPS, PLAIN, WEIGHTS
from kf_runtime.plan import row_major
from kf_runtime.route import Call, Generic, Operand, Reason, Route
from kf_runtime.system import System
from kf_runtime.untraced import untraced

OP: Final = "triangle_multiplicative_update"
_requires_grad: Final = attrgetter("requires_grad")
_WEIGHTS_FIRST: Final = ("p_in_weight", *PARAMETERS)


def _declined(code: str, text: str, *, binding: bool = False) -> Generic:
    return Generic(reason=Reason(code=code, text=text, binding=binding))


TRACING: Final = _declined("tracing", "the call is being traced or transformed; it is recorded as plain aten")
#: Precisions that ask for float32 products, which kernels of BF16 operands do not give.
FLOAT32_PRODUCTS: Final = (TriMulPrecision.TF32, TriMulPrecision.TF32x3, TriMulPrecision.IEEE)
PRECISION: Final = _declined(
    "precision", "the parameters are float32 and precision asks for float32 products; KF rounds them to BF16"
)
GRAD: Final = _declined("grad", "a gradient may be asked for; KF has no backward yet")


@untraced
def attempt(call: Arguments) -> Tensor | Generic:
    """The result from a kernel, or the generic path and why. ``call`` has passed ``check``.

    Raises NotAdmitted or Unavailable under force, DriverError where a launch fails.
    """
    current = dispatch.current()
    answer = _attempt(call, current)
    if isinstance(answer, Generic):
        current.counters.generic(answer.reason.code)
    return answer


def _attempt(call: Arguments, current: Dispatcher) -> Tensor | Generic:
    declined = quick(call, current)
    if declined is not None:
        return declined
    recalled = trimul_hot.recall(call, current)
    if recalled is not None:
        return recalled
    resolved = current.resolve(call.x.device, lambda system: describe(call, system))
    if isinstance(resolved, Generic):
        if current.mode is not Mode.FORCE:
            trimul_hot.decline(call, current, resolved)
        return resolved
    return trimul_hot.remember(as_bf16(call), current, resolved).to(call.x.dtype)


def explain(*args: Any, **kwargs: Any) -> Route:
    """The route of the call with these arguments; loads and launches nothing."""
    from kf_runtime.ops.triangle_multiplicative_update import arguments

    call = arguments(*args, **kwargs)
    check(call)
    current = dispatch.current()
    declined = quick(call, current)
    if declined is not None:
        return declined
    return current.decide(call.x.device, lambda system: describe(call, system))


def quick(call: Arguments, current: Dispatcher) -> Generic | None:
    """Why a call never reaches KF, from what is cheapest to look at; None where it may."""
    if current.mode is Mode.OFF:
        return dispatch.OFF
    x = call.x
    declined = _dtype(call)
    if declined is not None:
        return declined
    if torch.is_grad_enabled() and _any_grad(call):
        return GRAD
    if x.is_cpu and current.refuses_host():
        return dispatch.HOST
    return TRACING if traced(call.tensors()) else None


def _any_grad(call: Arguments) -> bool:
    """The pair and one weight first: where a gradient is asked for, they nearly always say so."""
    p = call.p_in_weight
    return call.x.requires_grad or (p is not None and p.requires_grad) or any(map(_requires_grad, call.tensors()))


def traced(tensors: list[Tensor]) -> bool:
    """Whether the call runs under a tracer, a functorch transform or a dispatch mode, or on tensor subclasses."""
    return trimul_hot.traced() or not PLAIN.issuperset(map(type, tensors))


def _dtype(call: Arguments) -> Generic | None:
    """The parameters have passed ``check``: they share one dtype, x's or float32."""
    dtype = call.x.dtype
    if dtype is not torch.bfloat16 and not (dtype is torch.float32 and call.precision == "bfloat16"):
        return _dtype_declined(dtype)
    return PRECISION if call.precision in FLOAT32_PRODUCTS and param_dtype(call) == "f32" else None


@functools.cache
def _dtype_declined(dtype: torch.dtype) -> Generic:
    text = (
        f"x is {dtype}; KF takes a BF16 pair with BF16 or float32 parameters, or float32 throughout with "
        'precision="bfloat16"'
    )
    return _declined("dtype", text)


def param_dtype(call: Arguments) -> str:
    """In which dtype the parameters of a call that KF takes count: "bf16" too where the caller asks for rounding."""
    if call.precision == "bfloat16":
        return "bf16"
    for name in _WEIGHTS_FIRST:
        tensor = getattr(call, name)
        if tensor is not None:
            return "f32" if tensor.dtype == torch.float32 else "bf16"
    return "bf16"


def as_bf16(call: Arguments) -> Arguments:
    """The call with a float32 pair, or another kind of mask, rounded to BF16, densely; the parameters as they are."""
    changes = {}
    if call.x.dtype != torch.bfloat16:
        changes["x"] = _round(call.x)
    if call.mask is not None and call.mask.dtype != torch.bfloat16:
        changes["mask"] = _round(call.mask)
    return call.with_tensors(changes) if changes else call


def _round(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16, memory_format=torch.contiguous_format)


def describe(call: Arguments, system: System) -> Call:
    """The metadata of a call that ``quick`` lets pass, all of it rounded to BF16; a reason where no cell can be."""
    cell = cell_of(call, system.sm)
    declined = None if cell is None else _options(call)
    if cell is None:
        declined = Reason(code="empty", text=f"x has no elements: shape {list(call.x.shape)}", binding=True)
    if declined is not None:
        return Call(op=OP, cell=cell, operands={}, declined=declined)
    operands = {name: _operand(name, value) for name, value in call.given().items()}
    operands["x"] = _operand("x", call.x)
    if call.mask is not None:
        operands["mask"] = _operand("mask", call.mask)
    return Call(op=OP, cell=cell, operands=operands)


def cell_of(call: Arguments, sm: str) -> Cell | None:
    """The cell of a call whose pair is, or will be, BF16; None for a pair without elements."""
    if not call.x.numel():
        return None
    return Cell(
        op=OP,
        param_dtype=param_dtype(call),
        B=prod(call.x.shape[:-3]),
        N=call.x.shape[-2],
        C=call.C,
        D=call.D,
        direction=call.direction,
        mask=call.mask is not None,
        biases=call.p_in_bias is not None,
        sm=sm,
    )


def _options(call: Arguments) -> Reason | None:
    """Why a call of a fine shape is still outside every cell."""
    if call.eps != EPS:
        return Reason(code="eps", text=f"eps: expected {EPS}; found {call.eps}", binding=True)
    missing = [name for name in WEIGHTS if getattr(call, name) is None]
    if missing:
        return Reason(code="weights", text=f"{', '.join(missing)}: expected a tensor; found None", binding=True)
    for name, tensor in call.given().items():
        if tensor.layout is not torch.strided:
            text = f"{name}: expected a dense tensor; found {tensor.layout}"
            return Reason(code="memory", text=text, binding=True)
    given = [name for name in BIASES if getattr(call, name) is not None]
    if len(given) not in (0, len(BIASES)):
        text = f"projection biases: expected all or none; found only {', '.join(given)}"
        return Reason(code="biases", text=text, binding=True)
    kind = call.x.device.type
    if trimul_hot.other_autocast(kind):
        text = f"autocast: expected torch.bfloat16 or none; found {torch.get_autocast_dtype(kind)}"
        return Reason(code="autocast", text=text, binding=True)
    return None


def _operand(name: str, tensor: Tensor) -> Operand:
    """Metadata with leading dimensions folded into one, as a plan's buffer table spells it.

    What will be rounded comes out dense and freshly allocated.
    """
    fresh = tensor.dtype != torch.bfloat16
    lead = tensor.dim() - {"x": 3, "mask": 2}.get(name, tensor.dim())
    inner = tuple(tensor.shape[lead:])
    shape: tuple[int, ...] = (prod(tensor.shape[:lead]), *inner) if name in ("x", "mask") else inner
    if fresh or tensor.is_contiguous():
        strides = row_major(shape)
    else:
        strides = tensor.stride() if tensor.dim() == len(shape) else (0, *tensor.stride()[lead:])
    return Operand(dtype="bf16", shape=shape, strides=strides, address=None if fresh else address_of(name, tensor))
