"""A hypothesis state machine of calls on the emulated driver: ``python -m tests.pytorch.machine EXAMPLES STEPS REAL``.

Each step is one or several calls with drawn shapes, strides, dtypes, options, modes, faults and
threads. The route that ``explain`` gives beforehand must be the one taken; generic results, and
those of real launches, must be near a float64 oracle. Prints its counts as one line of JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, Final

import kf_runtime
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kf_runtime import campaign, dispatch
from kf_runtime.ops import trimul_arguments
from kf_runtime.ops.triangle_multiplicative_update import generic_path
from kf_runtime.route import UseCubin

from kernel_factory.emulator import install_driver

DRIVER: Final = install_driver("sm_90a", launches="stub")
MODES: Final = {
    mode: dispatch.Dispatcher(campaign.Settings(mode=mode), Path(os.environ["KF_DATA"])) for mode in campaign.Mode
}
COUNTS: Final = {"calls": 0, "kernels": 0, "real": 0, "generic": 0, "errors": 0, "threads": 0, "faults": 0}
LIMIT: Final = {"real": 0}
TOLERANCE: Final = {
    torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-9,
}  # fmt: skip
CALLS: Final = (
    "cuInit",
    "cuLibraryLoadData",
    "cuFuncLoad",
    "cuCtxGetCurrent",
    "cuLaunchKernelEx",
    "cuStreamIsCapturing",
)
update = kf_runtime.triangle_multiplicative_update


@st.composite
def operands(draw: Any) -> dict[str, Any]:
    """Arguments of one call: half of them of an admitted cell, with now and then one thing out of place."""
    admitted = draw(st.booleans())
    N, C = (64, 64) if admitted else (draw(st.integers(0, 9)), draw(st.sampled_from((4, 8, 16))))
    D = C if admitted else draw(st.sampled_from((4, 8)))
    dtype = torch.bfloat16 if admitted else draw(st.sampled_from(tuple(TOLERANCE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 50)))

    def tensor(*shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 and shape[-1] else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    lead = (1,) if admitted else draw(st.sampled_from(((), (1,), (2,), (2, 1))))
    call: dict[str, Any] = {"x": tensor(*lead, N, N, C), "direction": "incoming"}
    call["mask"] = (torch.rand((*lead, N, N), generator=generator) > 0.1).to(dtype)
    for name, shape in trimul_arguments.shapes(C, D).items():
        if not (name[:2] in ("p_", "g_") and name.endswith("bias")):
            call[name] = tensor(*shape)
    odd = draw(
        st.sampled_from(
            ("", "", "", "float32", "strides", "offset", "mask", "no_mask", "eps", "direction", "norm", "bias")
        )
    )
    if odd == "float32":
        call = {k: v.float() if k.endswith(("weight", "bias")) else v for k, v in call.items()}
    elif odd == "strides":
        call["x"] = call["x"].transpose(-2, -3).contiguous().transpose(-2, -3)
    elif odd == "offset":
        w = call["p_in_weight"]
        call["p_in_weight"] = torch.cat((w.new_zeros(1), w.flatten()))[1:].view(w.shape)
    elif odd == "mask":
        call["mask"] = call["mask"] > 0
    elif odd == "no_mask":
        call["mask"] = None
    elif odd == "eps":
        call["eps"] = 1e-3
    elif odd == "direction":
        call["direction"] = "outgoing"
    elif odd == "norm":
        call["norm_out_bias"] = None
    elif odd == "bias":
        call["g_out_bias"] = tensor(C)
    return call


def oracle(call: dict[str, Any]) -> torch.Tensor:
    """The formula in float64."""
    return generic_path(**{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in call.items()})


def near(out: torch.Tensor, call: dict[str, Any]) -> bool:
    expected = oracle(call)
    return float((out.double() - expected).norm()) <= TOLERANCE[out.dtype] * float(expected.norm()) + 1e-12


class Calls(RuleBasedStateMachine):
    """Modes, calls, faults and threads in any order; the dispatchers live as long as the process."""

    @rule(mode=st.sampled_from((campaign.Mode.AUTO,) * 5 + tuple(campaign.Mode)))
    def switch(self, mode: campaign.Mode) -> None:
        dispatch.install(MODES[mode])

    @rule(calls=st.lists(operands(), min_size=3, max_size=3), grad=st.sampled_from((False, False, False, True)))
    def several(self, calls: list[dict[str, Any]], grad: bool) -> None:
        for call in calls:
            self.one(call, grad)

    @rule(seed=st.integers(0, 10**6), mode=st.sampled_from(("auto", "force", "preview")))
    def admitted(self, seed: int, mode: str) -> None:
        """Four stubbed calls of the smallest cell, and two that really launch."""
        dispatch.install(MODES[campaign.Mode(mode)])
        generator = torch.Generator().manual_seed(seed)
        call: dict[str, Any] = {"x": torch.randn((1, 64, 64, 64), generator=generator).bfloat16()}
        call |= {"direction": "incoming", "mask": (torch.rand((1, 64, 64), generator=generator) > 0.1).bfloat16()}
        for name, shape in trimul_arguments.shapes(64, 64).items():
            if not (name[:2] in ("p_", "g_") and name.endswith("bias")):
                scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
                call[name] = (torch.randn(shape, generator=generator) * scale).bfloat16()
        for i in range(6):
            self.one(call, launch=i % 3 == 2)

    def one(self, call: dict[str, Any], grad: bool = False, launch: bool = False) -> None:
        COUNTS["calls"] += 1
        if grad:
            call = {k: v.clone().requires_grad_() if k == "p_in_weight" else v for k, v in call.items()}
        before = DRIVER.launches
        with torch.set_grad_enabled(grad):
            route = kf_runtime.explain("triangle_multiplicative_update", **call)
            real = launch and isinstance(route, UseCubin) and COUNTS["real"] < LIMIT["real"]
            DRIVER.set_launches("run" if real else "stub")
            try:
                out = update(**call)
            except kf_runtime.NotAdmitted:
                COUNTS["errors"] += 1
                assert dispatch.current().mode is campaign.Mode.FORCE and not isinstance(route, UseCubin)
                return
            finally:
                DRIVER.set_launches("stub")
        assert DRIVER.launches - before == (3 if isinstance(route, UseCubin) else 0)
        assert out.shape == call["x"].shape and out.dtype == call["x"].dtype
        COUNTS["kernels" if isinstance(route, UseCubin) else "generic"] += 1
        COUNTS["real"] += real
        if real or not isinstance(route, UseCubin):
            assert near(out.detach(), call), route

    @rule(
        call=operands(), name=st.sampled_from(CALLS), result=st.sampled_from((2, 700, 719, 999)), skip=st.integers(0, 3)
    )
    def faulty(self, call: dict[str, Any], name: str, result: int, skip: int) -> None:
        COUNTS["calls"] += 1
        COUNTS["faults"] += 1
        before = DRIVER.launches
        dispatcher = dispatch.install(dispatch.Dispatcher(campaign.Settings(), MODES[campaign.Mode.AUTO].folder))
        try:
            with torch.no_grad(), DRIVER.fault(name, result, skip=skip, times=3):
                out = update(**call)
        except kf_runtime.KfError:
            COUNTS["errors"] += 1
            assert name == "cuLaunchKernelEx"
        else:
            assert DRIVER.launches > before or near(out, call)
        finally:
            dispatch.install(dispatcher)

    @rule(calls=st.lists(operands(), min_size=4, max_size=4))
    def threads(self, calls: list[dict[str, Any]]) -> None:
        dispatch.install(MODES[campaign.Mode.AUTO])
        wrong: list[Any] = []

        def work(call: dict[str, Any]) -> None:
            with torch.no_grad():
                route = kf_runtime.explain("triangle_multiplicative_update", **call)
                out = update(**call)
                if not isinstance(route, UseCubin) and not near(out, call):
                    wrong.append(route)

        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        COUNTS["calls"] += len(calls)
        COUNTS["threads"] += len(calls)

    @invariant()
    def handles_are_bounded(self) -> None:
        """The lasting dispatchers load each cubin once; only the throw-away ones of ``faulty`` load again."""
        assert DRIVER.open_libraries <= 9 * len(MODES) + 9 * COUNTS["faults"]


def main(examples: int, steps: int, real: int) -> None:
    """Run the machine and print the counts."""
    faulthandler.dump_traceback_later(1500, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    LIMIT["real"] = real
    dispatch.install(MODES[campaign.Mode.AUTO])
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_state_machine_as_test(Calls, settings=chosen)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started
    print(json.dumps({**COUNTS, "grown_mib": grown // 1024, "open": DRIVER.open_libraries}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
