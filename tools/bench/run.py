"""`make bench`: dispatch against its floor, the emulator's speed, compile time. One run, ratios side by side.

Dispatch runs the wheel's own code on the emulated driver with launches stubbed in C: what is timed
is the host side alone. Emulator figures are this CPU's. Nothing here is a GPU time.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

os.environ["CUEQ_TRIMUL_KF_CAMPAIGN"] = "auto"

import declined
import kf_runtime
import steady
import torch
from cuda.bindings import driver as cuda
from kf_runtime import campaign, dispatch
from kf_runtime import driver as kf_driver

from kernel_factory import emulator, pipeline
from kernel_factory.family import discover
from kernel_factory.reference import trimul_inputs
from kernel_factory.workspace import find

CELL = "/B1.N64.C128.D128/outgoing/mask/"


def prepare(folder: Path) -> pipeline.Selection:
    """One cell built, proved, admitted and packaged in a folder of its own."""
    here = find()
    workspace = replace(here, allowlists=folder / "allowlists", data=folder / "data", lock=folder / "lock")
    workspace.policy.parent.mkdir()
    workspace.policy.write_bytes(here.policy.read_bytes())
    selection = pipeline.select(workspace, ("trimul_mma",), ("sm_90a",), (CELL,))
    with ThreadPoolExecutor(2) as pool:
        pipeline.build(selection, pool, lambda *_: None, lambda *_: None)
    with ProcessPoolExecutor(1) as pool:
        pipeline.prove(selection, pool)
    pipeline.admit(selection)
    pipeline.pack(selection)
    return selection


def floor(selection: pipeline.Selection, operands: list[torch.Tensor]) -> Callable[[], object]:
    """Three launches with prebuilt pointer arrays, one data_ptr() an operand, output and scratch allocated."""
    (built,) = pipeline.built_cells(selection)
    launches = []
    for launch in built.plan.launches:
        library = kf_driver.load_library(selection.workspace.store.blob(launch.cubin))
        function = kf_driver.prepare(kf_driver.get_kernel(library, launch.symbol), launch.function_attributes, 0)
        images = [ctypes.create_string_buffer(image, len(image)) for image in launch.images]
        pointers = (ctypes.c_void_p * len(images))(*[ctypes.addressof(image) for image in images])
        config = kf_driver.launch_config(launch)
        launches.append((config, function, ctypes.addressof(pointers), (images, pointers)))
    scratch = sum(buffer.nbytes for buffer in built.plan.named("scratch"))
    shape = operands[0].shape

    def call() -> object:
        for operand in operands:
            operand.data_ptr()
        out = torch.empty(shape, dtype=torch.bfloat16)
        torch.empty(scratch, dtype=torch.uint8)
        for config, function, pointers, _ in launches:
            cuda.cuLaunchKernelEx(config, function, pointers, 0)
        return out

    return call


def bench_dispatch(selection: pipeline.Selection) -> None:
    """Declined calls against their argument checks, and an admitted one against its floor."""
    declined.before_a_driver()
    driver = emulator.install_driver("sm_90a", launches="stub")
    dispatch.install(dispatch.Dispatcher(campaign.Settings(mode=campaign.Mode.AUTO), selection.workspace.data))
    (cell,) = [cell for _, cell in selection.rows]
    inputs = trimul_inputs(cell, "random", 0)
    x, mask = inputs.pop("x"), inputs.pop("mask")
    wide = {name: value.float() for name, value in inputs.items()}
    op = kf_runtime.triangle_multiplicative_update
    with torch.no_grad():
        op(x, "outgoing", mask, **wide)
        op(x, "outgoing", mask, **inputs)
        before = driver.launches
        op(x, "outgoing", mask, **inputs)
        if driver.launches - before != 3:
            raise SystemExit(f"expected 3 launches of an admitted call; found {driver.launches - before}")
        figures = steady.microseconds(
            {
                "floor": floor(selection, [x, mask, *inputs.values()]),
                "admitted call": lambda: op(x, "outgoing", mask, **inputs),
                "… float32 parameters": lambda: op(x, "outgoing", mask, **wide),
            }
        )
    print("dispatch, launches stubbed in C (host side alone):")
    for name, value in figures.items():
        print(f"  {name:20} {value:6.2f} us   {value / figures['floor']:.2f} times the floor")
    rounding = figures["… float32 parameters"] - figures["admitted call"]
    print(f"  rounding {len(wide)} parameters in the call adds {rounding:.2f} us (torch's copies on the CPU included)")
    declined.on_the_driver({"x": x, "direction": "outgoing", "mask": mask, **inputs})


def bench_emulator(selection: pipeline.Selection) -> None:
    """Thread-instructions a second of each kernel in each mode, counters on."""
    (built,) = pipeline.built_cells(selection)
    store = selection.workspace.store
    print("emulator, million thread-instructions a second on one core (emulated, not a GPU):")
    inputs = trimul_inputs(built.cell, "random", 0)
    for mode in ("lockstep", "warp-serial", "race"):
        memory = emulator.Memory(seed=0)
        addresses = {}
        for buffer in built.plan.buffers:
            if buffer.role == "input":
                bits = inputs[buffer.name].contiguous().view(torch.int16).numpy()
                addresses[buffer.name] = memory.add(buffer.name, bits, writable=False)
            else:
                addresses[buffer.name] = memory.poison(buffer.name, buffer.nbytes)
        row = []
        for artifact, launch in zip(built.artifacts, built.plan.launches, strict=True):
            kernel = emulator.load(store.blob(artifact.ptx).decode()).kernels[launch.symbol]
            config = emulator.LaunchConfig(
                grid=launch.grid, block=launch.block, dynamic_shared=launch.shared_bytes,
                params=launch.images_at(addresses),
            )  # fmt: skip
            result = emulator.run(kernel, config, memory, mode=mode)
            row.append(f"{launch.kernel} {result.thread_instructions / result.seconds / 1e6:.0f}")
        print(f"  {mode:12} {', '.join(row)}")


def bench_compile(selection: pipeline.Selection) -> None:
    """`kf build` of one variant, in its own process, against plain cute.compile of the same kernel."""
    from kernel_factory import compile

    family = discover()["trimul_mma"]
    print("compile, seconds a variant:")
    for step in family.plan(selection.rows[0][1]).steps:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            compile.compile_kernel(Path(folder), step.spec, "sm_90a")
            built = time.perf_counter() - start
        plain = _plain_compile(step.spec)
        print(f"  {step.spec.kernel:9} kf build {built:.2f}, cute.compile {plain:.2f}, ratio {built / plain:.2f}")


def _plain_compile(spec: object) -> float:
    """Seconds of cute.compile alone, in a process that has imported the DSL."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(_compile_here, spec).result()


def _compile_here(spec: object) -> float:
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    import cutlass.cute  # noqa: F401  (its import is not part of the figure)

    from kernel_factory import compile

    entry = discover()["trimul_mma"].kernels.host_entry(spec)
    start = time.perf_counter()
    compile.compile_entry(entry)
    return time.perf_counter() - start


def bench_import() -> None:
    """CPU time that the op's import adds to torch's own, each in fresh processes."""
    code = (
        "import time; start = time.process_time(); import torch; middle = time.process_time()\n"
        "import kf_runtime; kf_runtime.triangle_multiplicative_update\n"
        "print(middle - start, time.process_time() - middle)"
    )
    runs = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        runs.append([float(part) for part in done.stdout.split()])
    torch_alone, added = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import: the op adds {added * 1e3:.0f} ms to torch's {torch_alone * 1e3:.0f} ms ({added / torch_alone:.3f})")


def main() -> None:
    """Print every figure."""
    bench_import()
    with tempfile.TemporaryDirectory(prefix="kf-bench-") as folder:
        selection = prepare(Path(folder))
        bench_dispatch(selection)
        bench_emulator(selection)
        bench_compile(selection)


if __name__ == "__main__":
    main()
