"""The hot path: a call whose signature has run before. One dictionary hit, the comparison, the launches.

Every operand's type, device, dtype, shape, contiguity, address alignment and (with grad mode on)
requires_grad are compared on every call; nothing is remembered by identity. What differs in
anything goes to ``trimul_kf``, which decides anew and knows the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, Final

import torch
from torch import Tensor

from kf_runtime import dispatch
from kf_runtime.dispatch import Dispatcher
from kf_runtime.execute import Executor
from kf_runtime.ops.trimul_arguments import Arguments, is_precision
from kf_runtime.route import Generic

EPS: Final = 1e-5
_BF16: Final = torch.bfloat16
PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
WEIGHTS: Final = (
    "norm_in_weight",
    "norm_in_bias",
    "p_in_weight",
    "g_in_weight",
    "norm_out_weight",
    "norm_out_bias",
    "p_out_weight",
    "g_out_weight",
)
BIASES: Final = ("p_in_bias", "g_in_bias", "p_out_bias", "g_out_bias")

_dtype_and_shape: Final = attrgetter("dtype", "shape")
_is_cpu: Final = attrgetter("is_cpu")
requires_grad: Final = attrgetter("requires_grad")
_is_contiguous: Final = Tensor.is_contiguous
_data_ptr: Final = Tensor.data_ptr
_process: Final = dispatch.Process
_grad_enabled: Final = torch.is_grad_enabled
# torch has no public form of these; where one is missing, every call counts as traced: the generic path.
_dispatch_modes: Final = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_functorch_level: Final = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: True)
_jit_trace: Final = getattr(torch._C, "_get_tracing_state", lambda: True)
_any_autocast: Final = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What an admitted signature resolved to. Lists follow the operands' order: x, mask, weights, biases.

    ``gather`` brings addresses into the executor's order, or is None where it is this one;
    ``misaligned`` are the address bits that must be zero; ``takes_tensors`` is the executor's.
    """

    executor: Executor
    signature: list[Any]
    place: Callable[[Tensor], Any]
    places: list[Any]
    gather: Callable[[Any], Any] | None
    misaligned: int
    takes_tensors: bool


def replay(
    x: Tensor,
    direction: str,
    mask: Tensor | None,
    weights: tuple[Tensor | None, ...],
    biases: tuple[Tensor | None, ...],
    eps: float,
    precision: object,
) -> Tensor | None:
    """The result, where this very signature is ready; None where ``trimul_kf`` has to look."""
    if (
        type(x) not in PLAIN
        or x.dtype is not _BF16
        or _dispatch_modes()
        or _functorch_level() is not None
        or _jit_trace() is not None
    ):
        return None
    try:
        key = (direction, mask is None, biases[0] is None, x.get_device(), x.shape, weights[2].shape)  # type: ignore[union-attr]
        ready: Ready | Generic | None = _process.current.table.get(key)
    except (
        TypeError,
        AttributeError,
    ):  # an unhashable direction, no p_in_weight: the argument check and explain name it
        return None
    if not isinstance(ready, Ready) or eps != EPS or not (precision is None or known_precision(precision)):
        return None
    operands: tuple[Any, ...] = (x, *weights) if mask is None else (x, mask, *weights)
    if biases[0] is not None:
        operands += biases
    elif biases[1] is not None or biases[2] is not None or biases[3] is not None:
        return None
    if (
        not PLAIN.issuperset(map(type, operands))
        or list(map(_dtype_and_shape, operands)) != ready.signature
        or list(map(ready.place, operands)) != ready.places
        or not all(map(_is_contiguous, operands))
        or (_grad_enabled() and any(map(requires_grad, operands)))
        or (_any_autocast() and other_autocast(x.device.type))
    ):
        return None
    addresses: Any = list(map(_data_ptr, operands))
    if reduce(or_, addresses) & ready.misaligned:
        return None
    if ready.takes_tensors:
        addresses = operands
    if ready.gather is not None:
        addresses = ready.gather(addresses)
    return ready.executor.run(addresses, x)


def remember(call: Arguments, executor: Executor) -> None:
    """Make the signature of an admitted BF16 call ready for ``replay``. ``call`` has been compared with the plan."""
    given = {"x": call.x, "mask": call.mask, **call.given()}
    names = tuple(name for name in ("x", "mask", *WEIGHTS, *BIASES) if given.get(name) is not None)
    operands = [getattr(call, name) for name in names]
    order = tuple(names.index(name) for name in executor.inputs)
    place = torch.Tensor.get_device if call.x.is_cuda else _is_cpu
    dispatch.current().table[_key(call)] = Ready(
        executor=executor,
        signature=list(map(_dtype_and_shape, operands)),
        place=place,
        places=list(map(place, operands)),
        gather=None if order == tuple(range(len(names))) else itemgetter(*order),
        misaligned=executor.alignment - 1,
        takes_tensors=executor.takes_tensors,
    )


def known(call: Arguments, current: Dispatcher) -> Generic | None:
    """The lasting reason for which this BF16 signature is declined, where it was decided before."""
    if call.p_in_weight is None:
        return None
    found = current.table.get(_key(call))
    return found if isinstance(found, Generic) else None


def decline(call: Arguments, current: Dispatcher, declined: Generic) -> None:
    """Remember that this signature is declined, whatever its operands' strides and addresses."""
    if call.p_in_weight is not None:
        current.table[_key(call)] = declined


def _key(call: Arguments) -> tuple[Any, ...]:
    """The table's key; ``replay`` spells the same one out."""
    x, p = call.x, call.p_in_weight
    assert p is not None, "a call without p_in_weight has no key"
    return (call.direction, call.mask is None, call.p_in_bias is None, x.get_device(), x.shape, p.shape)


def traced() -> bool:
    """Whether a tracer, a functorch transform or a dispatch mode is active."""
    return _dispatch_modes() > 0 or _functorch_level() is not None or _jit_trace() is not None


def known_precision(precision: object) -> bool:
    """Whether ``precision`` is a value that the op knows, None aside."""
    return precision == "bfloat16" or is_precision(precision)


def autocast_declines(kind: str) -> bool:
    """``other_autocast``, quick where no autocast is on at all."""
    return _any_autocast() and other_autocast(kind)


def other_autocast(kind: str) -> bool:
    """Whether autocast of this kind of device is on with a dtype other than BF16."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.bfloat16
