"""What a declined call costs: against torch's own dispatch, and against the modules that models ship.

``python tools/bench/pytorch.py [--compiled] [--n 32 64 …] [--dtype bf16 f32] [--grad]`` prints

1. the host side of declined calls that ask no driver, beside ``torch.library.custom_op`` and, where
   importable, a tvm-ffi call with the same tensors (``make bench`` prints the others);
2. time and peak memory of our declined call and of the modules of Boltz, OpenFold3 and Protenix, in
   interleaved rounds of one run: median ratio to the fastest module with a 95 % interval (bootstrap),
   and peak memory beside OpenFold3's default forward.

The packages are used where they are importable (``pip install --no-deps``, on PYTHONPATH); others are
named as missing. CPU time of one thread of this machine; no GPU time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ["CUEQ_TRIMUL_KF_CAMPAIGN"] = "auto"
os.environ.setdefault("LAYERNORM_TYPE", "torch")

import declined
import kf_runtime
import torch
from steady import Arms
from torch.profiler import ProfilerActivity, profile

update = kf_runtime.triangle_multiplicative_update
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
MODULES = {
    "boltz": ("boltz.model.layers.triangular_mult", lambda m, c: m.TriangleMultiplicationOutgoing(c)),
    "openfold3": (
        "openfold3.core.model.layers.triangular_multiplicative_update",
        lambda m, c: m.TriangleMultiplicationOutgoing(c, c),
    ),
    "protenix": ("protenix.model.triangular.triangular", lambda m, c: m.TriangleMultiplicationOutgoing(c, c)),
}


def beside(x: torch.Tensor, mask: torch.Tensor, rest: dict[str, torch.Tensor]) -> Arms:
    """Other dispatchers on the same tensors."""

    @torch.library.custom_op("kfbench::plain", mutates_args=())
    def plain(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(tensors[0])

    views = [x, mask, *rest.values()]
    arms: Arms = {
        "torch.library.custom_op": lambda: plain(views),
        "torch.empty_like alone": lambda: torch.empty_like(x),
    }
    try:
        import tvm_ffi

        function = tvm_ffi.convert(lambda *tensors: None)
        arms["tvm-ffi call"] = lambda: function(*views)
    except ImportError:
        print("  tvm-ffi is not importable here")
    return arms


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
    tensors = declined.operands(n, c, dtype)
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
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)  # one thread and its CPU time: figures hold on a machine that does other work as well
    declined.before_a_driver(beside)
    print("declined calls against modules (median of interleaved rounds, one run, this CPU):")
    for compiled in (False, True) if options.compiled else (False,):
        for dtype in options.dtype:
            for n in options.n:
                compare(n, options.channels, DTYPES[dtype], compiled=compiled, grad=options.grad, rounds=options.rounds)


if __name__ == "__main__":
    main()
