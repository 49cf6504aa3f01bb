"""triangle_multiplicative_update while Dynamo traces: the operator for admitted shapes, None for the formula.

Everything here is traced, so it looks at metadata alone and asks ``compile_budget`` for constants.
Nothing of ours is guarded but the pair's shape against the budget's slots.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import has_static_value

from kf_runtime.ops import compile_budget
from kf_runtime.ops.operators import OPERATOR, operands
from kf_runtime.ops.trimul_arguments import PARAMETERS, Arguments
from kf_runtime.ops.trimul_hot import BIASES, EPS, WEIGHTS
from kf_runtime.ops.trimul_kf import FLOAT32_PRODUCTS, param_dtype

#: The value of a size that has one, though Dynamo may hold it as a symbol. torch 2.11 calls it size_hint.
known: Any = getattr(symbolic_shapes, "guarding_hint_or_throw", getattr(symbolic_shapes, "size_hint", None))


def compiled(call: Arguments) -> Tensor | None:
    """The operator's result, where this shape gets a graph with kernels; None: trace the formula."""
    declined = _declined(call)
    if declined is None:
        declined = _shape(call)
    if declined is None:
        result: Tensor = OPERATOR(*operands(call))
        return result
    if declined != "export":
        compile_budget.note(declined)
    return None


def _declined(call: Arguments) -> str | None:
    """Why no shape of this call could run a kernel; the codes are those of eager calls."""
    if compile_budget.exporting():
        return "export"
    if torch.is_grad_enabled() and _any_grad(call):
        return "grad"
    if call.x.dtype != torch.bfloat16 and not (call.x.dtype == torch.float32 and call.precision == "bfloat16"):
        return "dtype"
    if param_dtype(call) == "f32" and call.precision in FLOAT32_PRODUCTS:
        return "precision"
    for name in WEIGHTS:
        if getattr(call, name) is None:
            return "weights"
    biases = 0
    for name in BIASES:
        biases += getattr(call, name) is not None
    if biases not in (0, len(BIASES)):
        return "biases"
    if call.eps != EPS:
        return "eps"
    kind = call.x.device.type
    if kind != "cpu" and kind != "cuda":
        return "device"
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.bfloat16:
        return "autocast"
    return None


def _any_grad(call: Arguments) -> bool:
    for name in ("x", "mask", *PARAMETERS):
        tensor = getattr(call, name)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _shape(call: Arguments) -> str | None:
    """None where this pair shape is admitted and within the budget."""
    if compile_budget.jit_wanted():
        return "jit"
    C, D = call.C, call.D
    if not (has_static_value(C) and has_static_value(D)):
        return "dynamic_channels"
    C, D = known(C), known(D)  # Dynamo may hold a known size as a symbol
    x = call.x
    device = str(x.device)
    kind = compile_budget.variant(call.direction, call.mask is not None, call.p_in_bias is not None, param_dtype(call))
    found = compile_budget.admitted(device, C, D, kind)
    if len(found) == 0:
        return "cell"
    B, N = prod(x.shape[:-3]), x.shape[-2]
    static = has_static_value(B) and has_static_value(N)
    if static:
        place = found.index((B, N)) if (B, N) in found else -1
    else:
        place = -1
        sizes = getattr(compile_budget.slots, compile_budget.slot_name(device, C, D, kind)).shape
        code = compile_budget.OPEN + B * compile_budget.STRIDE + N
        for i in range(len(found)):
            if place < 0 and code == sizes[i + 1]:
                place = i
    if place < 0:
        return "shape"
    b, n = found[place]
    if not static and compile_budget.marked():
        return "dynamic_shape"
    if not (b == B and n == N):
        return "shape"
    if not _dense(call):
        return "strides"
    if compile_budget.grant(device, (b, n, C, D), kind, static):
        return None
    return "budget"


def _dense(call: Arguments) -> bool:
    for name in ("x", "mask", *PARAMETERS):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_contiguous():
            return False
    return True
