"""What a declined call costs: against torch's own dispatch, and against the modules that models ship.

``python tools/bench/pytorch.py [--compiled] [--n 32 64 …] [--dtype bf16 f32] [--grad]`` prints

1. the host side of declined calls by the gate that decides, beside ``torch.library.custom_op`` and,
   where importable, a tvm-ffi call with the same tensors;
2. time and peak memory of our declined call and of the modules of Boltz, OpenFold3 and Protenix, in
   interleaved rounds of one run: median ratio to the fastest module with a 95 % interval (bootstrap),
   and peak memory beside OpenFold3's default forward.

The packages are used where they are importable (``pip install --no-deps``, on PYTHONPATH); others are
named as missing. CPU time of one thread of this machine; no GPU time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["CUEQ_TRIMUL_KF_CAMPAIGN"] = "auto"
os.environ.setdefault("LAYERNORM_TYPE", "torch")

import kf_runtime
import torch
from kf_runtime.ops import triangle_multiplicative_update as _op  # noqa: F401
from kf_runtime.ops import trimul_arguments
from torch.profiler import ProfilerActivity, profile

update = kf_runtime.triangle_multiplicative_update
home = importlib.import_module("kf_runtime.ops.triangle_multiplicative_update")
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
MODULES = {
    "boltz": ("boltz.model.layers.triangular_mult", lambda m, c: m.TriangleMultiplicationOutgoing(c)),
    "openfold3": (
        "openfold3.core.model.layers.triangular_multiplicative_update",
        lambda m, c: m.TriangleMultiplicationOutgoing(c, c),
    ),
    "protenix": ("protenix.model.triangular.triangular", lambda m, c: m.TriangleMultiplicationOutgoing(c, c)),
}
CALLS, ROUNDS = 300, 31


def operands(n: int, c: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of a biasless call."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1, n, n, c), "mask": (1, n, n), **trimul_arguments.shapes(c, c)}
    names = [k for k in shapes if not (k[:2] in ("p_", "g_") and k.endswith("bias"))]
    return {k: (torch.randn(shapes[k], generator=generator) * shapes[k][-1] ** -0.5).to(dtype) for k in names}


def microseconds(arms: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds a call, rounds interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    gc.disable()
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            start = time.process_time_ns()
            for _ in range(CALLS):
                arm()
            taken[name].append((time.process_time_ns() - start) / 1e3 / CALLS)
    gc.enable()
    return {name: median(values) for name, values in taken.items()}


def bench_declined() -> None:
    """Everything of a declined call but the formula itself, which is replaced by its argument."""
    bf16, f32 = operands(8, 32, torch.bfloat16), operands(8, 32, torch.float32)
    x, mask, rest = bf16["x"], bf16["mask"], {k: v for k, v in bf16.items() if k not in ("x", "mask")}
    grad = {k: v.clone().requires_grad_() for k, v in rest.items()}

    @torch.library.custom_op("kfbench::plain", mutates_args=())
    def plain(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(tensors[0])

    def empty() -> object:
        return torch.empty_like(x)

    arms: dict[str, Callable[[], object]] = {
        "declined by dtype": lambda: update(f32["x"], "outgoing", f32["mask"], **{k: f32[k] for k in rest}),
        "declined by device": lambda: update(x, "outgoing", mask, **rest),
        "torch.library.custom_op": lambda: plain([x, mask, *rest.values()]),
        "torch.empty_like alone": empty,
    }
    try:
        import tvm_ffi

        function = tvm_ffi.convert(lambda *tensors: None)
        views = [x, mask, *rest.values()]
        arms["tvm-ffi call"] = lambda: function(*views)
    except ImportError:
        print("  tvm-ffi is not importable here")
    real, home.generic = home.generic, lambda call: None
    arms["arguments and checks alone"] = lambda: home.generic_path(x, "outgoing", mask, **rest)
    try:
        with torch.no_grad():
            figures = microseconds(arms)
        figures |= microseconds({"declined by grad": lambda: update(x, "outgoing", mask, **grad)})
    finally:
        home.generic = real
    print("host side of a declined call, the formula itself taken out (us a call, checks of 10 tensors included):")
    for name, value in figures.items():
        print(f"  {name:26} {value:6.2f}")


def bench_declined_otherwise(data: Path) -> None:
    """Declines that need the manifest: launches stubbed in C on the emulated driver, whose cells are in ``data``."""
    from kf_runtime import campaign, dispatch

    from kernel_factory import emulator

    driver = emulator.install_driver("sm_90a", launches="stub")
    dispatch.install(dispatch.Dispatcher(campaign.Settings(mode=campaign.Mode.AUTO), data))
    named, small = operands(64, 64, torch.bfloat16), operands(8, 32, torch.bfloat16)
    call = {**named, "direction": "incoming"}
    turned = {**call, "x": named["x"].transpose(1, 2)}
    weight = named["p_in_weight"]
    shifted = {**call, "p_in_weight": torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape)}
    real, home.generic = home.generic, lambda call: None
    try:
        with torch.no_grad():
            update(**call)
            if driver.launches != 3:
                raise SystemExit(f"{data}: expected a cell of N=64, C=D=64, incoming, mask; found none")
            figures = microseconds(
                {
                    "declined by cell": lambda: update(**small),
                    "declined by strides": lambda: update(**turned),
                    "declined by alignment": lambda: update(**shifted),
                    "declined by eps": lambda: update(**call, eps=1e-3),
                    "arguments and checks alone": lambda: home.generic_path(**call),
                }
            )
    finally:
        home.generic = real
    for name, value in figures.items():
        print(f"  {name:26} {value:6.2f}")


def modules(c: int, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """One layer of each package that is importable, every parameter random."""
    found = {}
    for name, (path, make) in MODULES.items():
        try:
            layer = make(importlib.import_module(path), c)
        except ImportError as cause:
            print(f"  {name} is not importable here: {cause}")
            continue
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        found[name] = layer if name == "boltz" else layer.to(dtype)
    return found


def peak(call: Callable[[], object]) -> int:
    """Bytes at the peak of one call, above what was held before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    return top


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def compare(n: int, c: int, dtype: torch.dtype, *, compiled: bool, grad: bool, rounds: int) -> None:
    """One row: our declined call against the modules."""
    tensors = operands(n, c, dtype)
    x, mask = tensors.pop("x"), tensors.pop("mask")
    if grad:
        tensors = {k: v.requires_grad_() for k, v in tensors.items()}
    layers = modules(c, dtype)

    def ours(pair: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return update(pair, "outgoing", m, **tensors)

    def autocast(layer: torch.nn.Module) -> Callable[..., torch.Tensor]:
        def run(pair: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                return layer(pair, m)

        return run

    functions: dict[str, Callable[..., Any]] = {"ours": ours}
    functions |= {k: autocast(v) if k == "boltz" else v for k, v in layers.items()}
    if compiled:
        torch._dynamo.reset()
        functions = {k: torch.compile(v, dynamic=False) for k, v in functions.items()}

    def once(function: Callable[..., Any]) -> None:
        out = function(x, mask)
        if grad:
            out.float().sum().backward()

    with torch.set_grad_enabled(grad):
        for function in functions.values():
            once(function), once(function)
        taken: dict[str, list[float]] = {k: [] for k in functions}
        for _ in range(rounds):
            order = list(functions)
            random.shuffle(order)
            for name in order:
                start = time.process_time()
                once(functions[name])
                taken[name].append(time.process_time() - start)
        peaks = {k: peak(lambda f=f: once(f)) for k, f in functions.items()}
    best = min((k for k in functions if k != "ours"), key=lambda k: median(taken[k]), default="ours")
    ratios = [a / b for a, b in zip(taken["ours"], taken[best], strict=True)]
    low, high = interval(ratios)
    default = peaks.get("openfold3", peaks["ours"])
    print(
        f"  N={n:<4} {str(dtype)[6:]:9} {'compiled' if compiled else 'eager':9}{'grad ' if grad else 'no grad '}"
        + " ".join(f"{k} {median(v) * 1e3:.2f} ms {peaks[k] / 2**20:.0f} MiB," for k, v in taken.items())
        + f" ours / {best} {median(ratios):.3f} [{low:.3f}, {high:.3f}], memory / openfold3 "
        f"{peaks['ours'] / max(1, default):.2f}",
        flush=True,
    )


def main() -> None:
    """Print every figure that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="*", default=[32, 64, 128, 256, 384])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--dtype", nargs="*", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--compiled", action="store_true", help="also under torch.compile (minutes)")
    parser.add_argument("--grad", action="store_true", help="forward and backward instead of no grad")
    parser.add_argument("--data", type=Path, help="a packaged folder: declines that need the manifest, and no modules")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)  # one thread and its CPU time: figures hold on a machine that does other work as well
    if options.data is not None:
        return bench_declined_otherwise(options.data)
    bench_declined()
    print("declined calls against modules (median of interleaved rounds, one run, this CPU):")
    for compiled in (False, True) if options.compiled else (False,):
        for dtype in options.dtype:
            for n in options.n:
                compare(n, options.channels, DTYPES[dtype], compiled=compiled, grad=options.grad, rounds=options.rounds)


if __name__ == "__main__":
    main()
