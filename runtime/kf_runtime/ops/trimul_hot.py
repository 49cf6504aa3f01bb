"""The hot path: a call whose signature has run before. One dictionary hit, the comparison, the launches.

Every operand's type, device, dtype, shape, contiguity, address and its alignment and (with grad mode
on) requires_grad are compared on every call; nothing is remembered by identity. What differs in
anything goes to ``trimul_kf``, which decides anew and knows the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, Final

import torch
from torch import Tensor

from kf_runtime import dispatch
from kf_runtime.dispatch import Dispatcher
from kf_runtime.execute import Executor
from kf_runtime.ops.trimul_arguments import Arguments, is_precision
from kf_runtime.rounding import Rounding
from kf_runtime.route import Generic
from kf_runtime.untraced import untraced

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

_NO_BIASES: Final = (None,) * len(BIASES)
_SLOTS: Final = ("x", "mask", *WEIGHTS, *BIASES)

#: Reasons that hold for a key, whatever else a call's operands are.
LASTING: Final = frozenset(("sm", "cell", "product", "manifest", "cubin_missing", "cubin_corrupt",
                            "driver_too_old", "driver_error", "eps", "empty", "parameter_dtype"))  # fmt: skip
#: Reasons that hold for calls of the same metadata: strides, low address bits, which operands there are.
OF_METADATA: Final = frozenset(("strides", "alignment", "shape", "operands", "weights", "biases",
                                "autocast"))  # fmt: skip
#: Declined metadata of a key that are remembered at most.
DECLINED_LIMIT: Final = 64
#: Address bits that any plan's alignment may depend on.
_LOW: Final = 255

_slots_of: Final = attrgetter(*_SLOTS)
_dtype_and_shape: Final = attrgetter("dtype", "shape")
_dtype_shape_and_device: Final = attrgetter("dtype", "shape", "device")
_strides: Final = Tensor.stride
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
_forward_ad: Final = torch.autograd.forward_ad


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What an admitted signature resolved to. Lists follow the operands' order: x, mask, weights, biases.

    ``gather`` brings addresses into the executor's order, or is None where it is this one;
    ``misaligned`` are the address bits that must be zero. Operands from ``first`` on are float32 and go
    through ``rounding``; it is None where none are. ``direct``: the executor takes the operands' own addresses.
    """

    executor: Executor
    layout: list[Any]
    place: Callable[[Tensor], Any]
    places: list[Any]
    gather: Callable[[Any], Any] | None
    misaligned: int
    rounding: Rounding | None
    first: int
    direct: bool

    def run(self, operands: Sequence[Tensor]) -> Tensor:
        """Round what has to be, and launch."""
        narrow: list[Tensor] = list(operands)  # holds what is rounded until the launches are queued
        if self.rounding is not None:
            narrow[self.first :] = self.rounding(operands[self.first :], operands[0])
        places: Any = narrow if self.executor.takes_tensors else list(map(_data_ptr, narrow))
        return self.executor.run(places if self.gather is None else self.gather(places), operands[0])


@dataclass(slots=True)
class Signature:
    """What is known of the calls that share a key (``_key``).

    ``lasting`` is why none of them runs a kernel; ``ready`` serves those that do; ``declined`` holds,
    by the rest of a call's metadata (``_metadata``), why calls that were looked at before run none.
    """

    lasting: Generic | None = None
    ready: Ready | None = None
    declined: dict[Any, Generic] = field(default_factory=dict)


@untraced
def replay(
    x: Tensor,
    direction: str,
    mask: Tensor | None,
    weights: tuple[Tensor | None, ...],
    biases: tuple[Tensor | None, ...],
    eps: float,
    precision: object,
) -> Tensor | Generic | None:
    """The result, where this very signature is ready, or why such a call was declined before.

    Either way another call of the same metadata has passed the argument check. None where
    ``trimul_kf`` has to look.
    """
    table = _process.current.table
    if (
        not table
        or type(x) not in PLAIN
        or x.dtype is not _BF16
        or _dispatch_modes()
        or _functorch_level() is not None
        or _jit_trace() is not None
        or dual()
    ):
        return None
    try:
        if _grad_enabled() and (x.requires_grad or weights[2].requires_grad):  # type: ignore[union-attr]
            return None  # a gradient that is asked for nearly always shows here, before anything else is looked at
        key = (
            direction, mask is None, biases[0] is None, x.get_device(), x.shape, _dtype_and_shape(weights[2]), eps,
            precision,
        )  # fmt: skip
        known: Signature | None = table.get(key)
    except (TypeError, AttributeError, RuntimeError):  # unhashable, no p_in_weight, no shape: the long way knows
        return None
    if known is None or known.lasting is not None or not (precision is None or known_precision(precision)):
        return None
    ready = known.ready
    addresses: Any = None
    try:
        if ready is not None:
            operands: tuple[Any, ...] = (x, *weights) if mask is None else (x, mask, *weights)
            if biases[0] is not None:
                operands += biases
            if (
                PLAIN.issuperset(map(type, operands))
                and not (_grad_enabled() and any(map(requires_grad, operands)))
                and all(map(_is_contiguous, operands))
                and list(map(_dtype_and_shape, operands)) == ready.layout
                and list(map(ready.place, operands)) == ready.places
                and (biases[0] is not None or biases == _NO_BIASES)
                and not (_any_autocast() and other_autocast(x.device.type))
            ):
                addresses = list(map(_data_ptr, operands if ready.direct else operands[: ready.first]))
        if ready is None or addresses is None or not all(addresses) or reduce(or_, addresses) & ready.misaligned:
            return known.declined.get(_metadata((x, mask, *weights, *biases))) if known.declined else None
    except RuntimeError:  # a sparse operand: the long way names it
        return None
    if not ready.direct:
        return ready.run(operands)
    places: Any = addresses if ready.gather is None else ready.gather(addresses)
    return ready.executor.run(places, x)


def _metadata(operands: tuple[Tensor | None, ...]) -> tuple[Any, ...] | None:
    """What a decision depends on beside the key, the mode and the manifest.

    None where grad or a subclass decides, or a sparse operand has no strides.
    """
    given = [tensor for tensor in operands if tensor is not None]
    if not PLAIN.issuperset(map(type, given)) or (_grad_enabled() and any(map(requires_grad, given))):
        return None
    try:
        return (
            tuple([tensor is None for tensor in operands]),
            tuple(map(_dtype_shape_and_device, given)),
            tuple(map(_strides, given)),
            tuple([address & _LOW for address in map(_data_ptr, given)]),
            autocast_declines(given[0].device.type),
        )
    except RuntimeError:
        return None


def remember(call: Arguments, current: Dispatcher, executor: Executor) -> Tensor:
    """The result of an admitted call whose pair is BF16, and its signature made ready for ``replay``.

    ``call`` has been compared with the plan.
    """
    given = {"x": call.x, "mask": call.mask, **call.given()}
    names = tuple(name for name in _SLOTS if given.get(name) is not None)
    operands = [getattr(call, name) for name in names]
    order = tuple(names.index(name) for name in executor.inputs)
    place = torch.Tensor.get_device if call.x.is_cuda else _is_cpu
    wide = [tensor for tensor in operands if tensor.dtype == torch.float32]
    ready = _signature(call, current).ready = Ready(
        executor=executor,
        layout=list(map(_dtype_and_shape, operands)),
        place=place,
        places=list(map(place, operands)),
        gather=None if order == tuple(range(len(names))) else itemgetter(*order),
        misaligned=executor.alignment - 1,
        rounding=Rounding([tensor.shape for tensor in wide]) if wide else None,
        first=len(names) - len(wide),
        direct=not wide and not executor.takes_tensors,
    )
    return ready.run(operands)


def recall(call: Arguments, current: Dispatcher) -> Generic | None:
    """Why a call of this metadata was declined before; None where none was."""
    known: Signature | None = current.table.get(_key(call))
    if known is None:
        return None
    return known.lasting or (known.declined.get(_metadata(_slots_of(call))) if known.declined else None)


def decline(call: Arguments, current: Dispatcher, declined: Generic) -> None:
    """Remember why a call is declined, for as much of its metadata as the reason depends on."""
    if declined.reason.code in LASTING:
        _signature(call, current).lasting = declined
    elif declined.reason.code in OF_METADATA:
        rest, metadata = _signature(call, current).declined, _metadata(_slots_of(call))
        if len(rest) >= DECLINED_LIMIT:
            rest.clear()
        if metadata is not None:
            rest[metadata] = declined


def _signature(call: Arguments, current: Dispatcher) -> Signature:
    """The table's record of a call."""
    key = _key(call)
    known: Signature | None = current.table.get(key)
    if known is None:
        known = Signature()
        current.remember(key, known)
    return known


def _key(call: Arguments) -> tuple[Any, ...]:
    """The table's key; ``replay`` spells the same one out."""
    x, p = call.x, call.p_in_weight
    return (
        call.direction, call.mask is None, call.p_in_bias is None, x.get_device(), x.shape,
        None if p is None else _dtype_and_shape(p), call.eps, call.precision,
    )  # fmt: skip


def traced() -> bool:
    """Whether a tracer, a functorch transform, a dispatch mode or forward-mode differentiation is active."""
    return _dispatch_modes() > 0 or _functorch_level() is not None or _jit_trace() is not None or dual()


def dual() -> bool:
    """Whether tensors may carry tangents (``torch.autograd.forward_ad``), which no_grad does not keep from them."""
    return getattr(_forward_ad, "_current_level", 0) >= 0


def known_precision(precision: object) -> bool:
    """Whether ``precision`` is a value that the op knows, None aside."""
    return precision == "bfloat16" or is_precision(precision)


def autocast_declines(kind: str) -> bool:
    """``other_autocast``, quick where no autocast is on at all."""
    return _any_autocast() and other_autocast(kind)


def other_autocast(kind: str) -> bool:
    """Whether autocast of this kind of device is on with a dtype other than BF16."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.bfloat16
