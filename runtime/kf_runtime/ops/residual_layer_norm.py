"""residual_layer_norm: LayerNorm of a pair plus its residual. The smallest op: the one to write a first kernel for.

A kernel where one is admitted; else plain torch. Grad, traced and compiled calls are always plain torch.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kf_runtime import dispatch
from kf_runtime.campaign import Mode
from kf_runtime.cell import NO_DIRECTION, Cell
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import ArgumentError
from kf_runtime.execute import Executor
from kf_runtime.ops.trimul_arguments import address_of, check_dense
from kf_runtime.ops.trimul_hot import PLAIN, traced
from kf_runtime.plan import row_major
from kf_runtime.route import Call, Generic, Operand, Reason, Route
from kf_runtime.system import System
from kf_runtime.untraced import untraced

OP: Final = "residual_layer_norm"
EPS: Final = 1e-5
_NAMES: Final = ("x", "residual", "weight", "bias")


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """``LayerNorm(x + residual) * weight + bias`` over the last dimension.

    Args:
        x: ``[*, C]``, any strides, any floating dtype. A kernel takes BF16 pairs ``[*, N, N, C]``.
        residual: as x, in shape, dtype and device.
        weight, bias: ``[C]``, x's dtype or float32. None: ones, zeros.
        eps: added to the variance.

    Returns:
        x's shape and dtype. The sum and the statistics are in float32 at least.

    Raises:
        ArgumentError (a ValueError): names the argument, what was expected and what came.
        NotAdmitted, Unavailable: under CUEQ_TRIMUL_KF_CAMPAIGN=force, where no kernel runs.
        DriverError: a launch failed.
    """
    _check(x, residual, weight, bias)
    if torch.compiler.is_compiling():
        return _formula(x, residual, weight, bias, eps)
    return _eager(x, residual, weight, bias, eps)


@untraced
def _eager(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    current = dispatch.current()
    found = _resolve((x, residual, weight, bias), eps, current)
    if isinstance(found, Generic):
        current.counters.generic(found.reason.code)
        return _formula(x, residual, weight, bias, eps)
    named: dict[str, Any] = dict(zip(_NAMES, (x, residual, weight, bias), strict=True))
    operands = [named[name] for name in found.inputs]
    return found.run(operands if found.takes_tensors else [tensor.data_ptr() for tensor in operands], x)


def explain(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Route:
    """The route of a call with these arguments; loads and launches nothing."""
    _check(x, residual, weight, bias)
    operands, current = (x, residual, weight, bias), dispatch.current()
    return _quick(operands, eps, current) or current.decide(x.device, lambda system: _describe(operands, system))


def _formula(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    scale, shift = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide) + residual.to(wide), x.shape[-1:], scale, shift, eps).to(x.dtype)


def _check(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for name, value in zip(_NAMES, (x, residual, weight, bias), strict=True):
        if value is not None or name in ("x", "residual"):
            check_dense(name, value)
    if x.dim() == 0 or not x.is_floating_point():
        raise ArgumentError("x", expected="a floating tensor [*, C]", found=f"{x.dtype}, shape {list(x.shape)}")
    for name, given, shape, dtypes in (
        ("residual", residual, x.shape, {x.dtype}),
        ("weight", weight, x.shape[-1:], {x.dtype, torch.float32}),
        ("bias", bias, x.shape[-1:], {x.dtype, torch.float32}),
    ):
        if given is None:
            continue
        if given.shape != shape or given.dtype not in dtypes or given.device != x.device:
            wanted = f"{' or '.join(sorted(map(str, dtypes)))} {list(shape)} on {x.device}"
            raise ArgumentError(name, expected=wanted, found=f"{given.dtype} {list(given.shape)} on {given.device}")


def _resolve(operands: tuple[Any, ...], eps: float, current: Dispatcher) -> Executor | Generic:
    """An executor whose buffers these operands match, or the generic path and why; each decision is made once."""
    declined = _quick(operands, eps, current)
    if declined is not None:
        return declined
    x = operands[0]
    key = (OP, x.get_device(), x.shape, *((t.stride(), _low_bits(t.data_ptr())) for t in operands))
    known = current.table.get(key)
    if known is None:
        known = current.resolve(x.device, lambda system: _describe(operands, system))
        if not isinstance(known, Generic) or (known.error is None and current.mode is not Mode.FORCE):
            current.remember(key, known)
    found: Executor | Generic = known
    return found


def _low_bits(address: int) -> int:
    """What an address means for a decision: how it is aligned, or that there is none."""
    return address & 255 if address else -1


def _quick(operands: tuple[Any, ...], eps: float, current: Dispatcher) -> Generic | None:
    """Why a call never reaches a kernel, from what is cheapest to look at; None where it may."""
    x, given = operands[0], [t for t in operands if t is not None]
    if current.mode is Mode.OFF:
        return dispatch.OFF
    if any(t.dtype is not torch.bfloat16 for t in given):
        return _declined("dtype", "x, residual, weight and bias must all be torch.bfloat16")
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _declined("grad", "a gradient may be asked for; there is no backward kernel")
    if traced() or not PLAIN.issuperset(map(type, given)):
        return _declined("tracing", "the call is being traced or transformed; it is recorded as plain aten")
    if x.is_cpu and current.refuses_host():
        return dispatch.HOST
    if len(given) < len(operands):
        return _declined("weights", "weight and bias: expected tensors; found None", binding=True)
    if eps != EPS:
        return _declined("eps", f"eps: expected {EPS}; found {eps}", binding=True)
    if x.dim() < 3 or x.shape[-2] != x.shape[-3] or not x.numel():
        return _declined("shape", f"x: expected a pair [*, N, N, C]; found {list(x.shape)}", binding=True)
    return None


def _declined(code: str, text: str, *, binding: bool = False) -> Generic:
    return Generic(reason=Reason(code=code, text=text, binding=binding))


def _describe(operands: tuple[Any, ...], system: System) -> Call:
    """The metadata of a call that ``_quick`` lets pass: leading dimensions folded into one."""
    batch, n, c = prod(operands[0].shape[:-3]), operands[0].shape[-2], operands[0].shape[-1]
    cell = Cell(op=OP, B=batch, N=n, C=c, D=c, direction=NO_DIRECTION, mask=False, sm=system.sm)
    shapes = ((batch, n, n, c), (batch, n, n, c), (c,), (c,))
    described = {name: _operand(name, t, s) for name, t, s in zip(_NAMES, operands, shapes, strict=True)}
    return Call(op=OP, cell=cell, operands=described)


def _operand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Operand:
    own = tensor.stride()
    strides = row_major(shape) if tensor.is_contiguous() else (*(0,) * (len(shape) - len(own)), *own[-len(shape) :])
    return Operand(dtype="bf16", shape=shape, strides=strides, address=address_of(name, tensor))
