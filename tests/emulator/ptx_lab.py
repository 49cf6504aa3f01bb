"""Small PTX kernels for tests: text around a body, and one value a thread in and out."""

from __future__ import annotations

import numpy as np

from kernel_factory.emulator import LaunchConfig, Memory, Result, load, run

THREADS = 64
HEAD = ".version 9.3\n.target sm_80\n.address_size 64\n"


def kernel_text(body: str, params: tuple[str, ...] = (), threads: int = THREADS, shared: str = "") -> str:
    """A kernel ``k`` with 64-bit pointer parameters, common registers, and ``body``."""
    plist = ", ".join(f".param .u64 {p}" for p in params)
    return (
        f"{HEAD}{shared}\n.visible .entry k({plist})\n.reqntid {threads}, 1, 1\n{{\n"
        ".reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .b128 %q<4>;\n"
        + body.replace(";", ";\n")  # a statement a line, so that findings and counts name one
        + "\nret;\n}\n"
    )


def launch(
    body: str,
    buffers: dict[str, np.ndarray | int],
    *,
    threads: int = THREADS,
    grid: int = 1,
    mode: str = "lockstep",
    seed: int = 0,
    shared: str = "",
    dynamic: int = 0,
    readonly: tuple[str, ...] = (),
) -> tuple[Result, Memory]:
    """Run ``body`` with a pointer parameter for each buffer (an int asks for that many poisoned bytes)."""
    memory = Memory(seed)
    params = []
    for name, content in buffers.items():
        if isinstance(content, int):
            address = memory.poison(name, content)
        else:
            address = memory.add(name, content, writable=name not in readonly)
        params.append(address.to_bytes(8, "little"))
    text = kernel_text(body, tuple(buffers), threads, shared)
    config = LaunchConfig(
        grid=(grid, 1, 1), block=(threads, 1, 1), dynamic_shared=dynamic, params=tuple(params), shared_limit=232448
    )
    return run(load(text).kernels["k"], config, memory, mode=mode, seed=seed), memory


def _register(name: str, dtype: np.dtype) -> str:
    return f".reg .b{max(16, 8 * dtype.itemsize)} {name};"


def apply(body: str, inputs: dict[str, np.ndarray], outputs: dict[str, type]) -> dict[str, np.ndarray]:
    """Run ``body`` with one element a thread in each ``%<input>`` register; return the ``%<output>`` registers.

    Registers have the arrays' widths; ``bool`` outputs are predicates.
    """
    n = len(next(iter(inputs.values())))
    assert n == THREADS
    lines, buffers = ["mov.u32 %r0, %tid.x;"], {}
    for name, array in inputs.items():
        size = array.dtype.itemsize
        lines += [
            _register(f"%{name}", array.dtype),
            f"ld.param.u64 %d0, [in_{name}]; mul.wide.u32 %d1, %r0, {size}; add.s64 %d0, %d0, %d1;",
            f"ld.global.b{8 * size} %{name}, [%d0];",
        ]
        buffers[f"in_{name}"] = array
    for name, dtype in outputs.items():
        lines.append(f".reg .pred %{name};" if dtype is bool else _register(f"%{name}", np.dtype(dtype)))
        buffers[f"out_{name}"] = n * (4 if dtype is bool else np.dtype(dtype).itemsize)
    lines.append(body)
    for name, dtype in outputs.items():
        size = 4 if dtype is bool else np.dtype(dtype).itemsize
        source = f"%{name}"
        if dtype is bool:
            lines.append(f"selp.b32 %r1, 1, 0, %{name};")
            source = "%r1"
        lines.append(
            f"ld.param.u64 %d0, [out_{name}]; mul.wide.u32 %d1, %r0, {size}; add.s64 %d0, %d0, %d1; "
            f"st.global.b{8 * size} [%d0], {source};"
        )
    result, memory = launch("\n".join(lines), buffers)
    assert not result.findings, [str(f) for f in result.findings]
    out = {}
    for name, dtype in outputs.items():
        raw = memory.read(f"out_{name}", np.uint32 if dtype is bool else dtype, (n,))
        out[name] = raw.astype(bool) if dtype is bool else raw
    return out


def kinds(result: Result) -> set[str]:
    """The kinds of a run's findings."""
    return {finding.kind for finding in result.findings}
