"""Every gate between a call and its kernel, in order, and what each one says: the long form of ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kf_runtime import dispatch
from kf_runtime.gates import GATES, gate_of
from kf_runtime.ops import trimul_kf
from kf_runtime.ops.triangle_multiplicative_update import arguments
from kf_runtime.ops.trimul_arguments import check
from kf_runtime.route import Generic, Route, UseCubin


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A route, the gate that decided it (None: every gate was passed), and what limits it has elsewhere."""

    route: Route
    gate: str | None
    budget: str
    memory: str

    def __str__(self) -> str:
        lines = []
        for name, _ in GATES:
            if name == self.gate:
                lines.append(f"  {name:13} decides: {self.route}")
                break
            lines.append(f"  {name:13} passed")
        else:
            lines.append(f"  {'route':13} {self.route}")
        return "\n".join((*lines, f"  {'budget':13} {self.budget}", f"  {'memory':13} {self.memory}"))


def explain_gates(*args: Any, **kwargs: Any) -> Explanation:
    """Walk every gate for a call of triangle_multiplicative_update with these arguments; loads and launches nothing."""
    call = arguments(*args, **kwargs)
    check(call)
    route = trimul_kf.explain(*args, **kwargs)
    current = dispatch.current()
    gate = gate_of(route.reason.code) if isinstance(route, Generic) else None
    pair = call.x.numel() // max(1, call.C)
    return Explanation(route=route, gate=gate, budget=_budget(call), memory=_memory(route, pair * 2 * call.D, current))


def _budget(call: Any) -> str:
    """What torch.compile would make of this shape. Looks at the budget only where Dynamo was used already."""
    import sys

    if "kf_runtime.ops.compile_budget" not in sys.modules:
        return "torch.compile has traced no call of this process yet"
    from kf_runtime.ops import compile_budget

    state = compile_budget.state()
    shape = (call.x.shape[:-3].numel(), int(call.x.shape[-2]), call.C)
    has = "has a graph" if shape in state["granted"] else "has no graph yet"
    return f"torch.compile: {len(state['granted'])} of {state['limit']} shapes have KF graphs; this one {has}"


def _memory(route: Route, elements: int, current: dispatch.Dispatcher) -> str:
    if not isinstance(route, Generic):
        buffers = route.plan.buffers if isinstance(route, UseCubin) else route.buffers
        scratch = sum(buffer.nbytes for buffer in buffers if buffer.role == "scratch")
        return f"{scratch / 2**20:.1f} MiB of scratch, from torch's allocator"
    return f"a and b of the generic path: {elements} elements; {current.counters.generic_calls()} calls so far"
