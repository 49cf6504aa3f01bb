"""Cases of quack-kernels (CuTe DSL), compiled GPU-blind for sm_90a and sm_100a and captured by record and replay."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from kernel_factory import capture, elf
from kernel_factory.family import KernelSpec, Step

from .cases import Case, Expected, Image, Launch, bf16, from_bf16

if importlib.util.find_spec("quack") is None:
    raise ImportError("quack-kernels is not installed")

SMS = ("sm_90a", "sm_100a")
ROWS = 8
SIZES = {"small": 512, "odd": 760, "wide": 20480}
EXTENTS = {  # M, N, K, as in the worker
    "cluster1": (192, 160, 128),
    "cluster2": (192, 160, 128),
    "persistent1": (192, 224, 640),
    "persistent2": (192, 224, 640),
    "pingpong": (192, 160, 640),
}
ROOT = Path(__file__).parent.parent.parent


@lru_cache
def _state() -> str:
    """What compiled kernels depend on: the worker, and the versions of quack and the DSL."""
    versions = [importlib.metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl")]
    source = Path(__file__).with_name("quack_worker.py").read_bytes()
    return hashlib.sha256(source + " ".join(versions).encode()).hexdigest()[:16]


def _compiled(name: str, sm: str) -> tuple[str, bytes, bytes, dict]:
    """PTX, cubin, host object and the worker's reply; kept in build/conformance, since a compile takes seconds."""
    folder = ROOT / "build" / "conformance" / f"{name}.{sm}.{_state()}"
    if not (folder / "reply.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")},
            "CUTE_DSL_ARCH": sm, "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": str(folder),
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "tests.conformance.quack_worker", name, str(folder)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-700:])
    (ptx,), (cubin,) = folder.glob("*.ptx"), folder.glob("*.cubin")
    reply = json.loads((folder / "reply.json").read_text())
    return ptx.read_text(), cubin.read_bytes(), (folder / "host.o").read_bytes(), reply


def _launch(name: str, sm: str, arrays: tuple[np.ndarray, ...], expected: dict[int, Expected]) -> Launch:
    ptx, cubin, host, reply = _compiled(name, sm)
    (info,) = elf.kernels(cubin)
    code = capture.HostCode(object_bytes=host, entry=reply["entry"], cubin="", kernel=info, sm=sm)
    operands = tuple(f"b{i}" for i in range(reply["pointers"]))
    step = Step(spec=KernelSpec.of("quack", name), operands=operands, scalars=())
    recorded = capture.capture(code, step)
    args = []
    for place, image in enumerate(recorded.images):
        slots = tuple((x.offset, x.buffer, x.addend) for x in recorded.slots if x.parameter == place)
        args.append(Image(data=image, slots=slots))
    return Launch(
        ptx=ptx, kernel=info.symbol, grid=recorded.grid, block=recorded.block, cluster=recorded.cluster,
        shared=recorded.shared_bytes, args=tuple(args), expected={f"b{k}": e for k, e in expected.items()},
        buffers={f"b{i}": array for i, array in enumerate(arrays)},
    )  # fmt: skip


def _x(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _near(x: np.ndarray, rtol: float = 1e-5, atol: float = 1e-6) -> Expected:
    return Expected(values=np.ascontiguousarray(x, np.float32), rtol=rtol, atol=atol)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def rmsnorm(size: str, sm: str) -> Launch:
    n = SIZES[size]
    x, w = bf16(_x(0, ROWS, n)), _x(1, n)
    v = from_bf16(x).astype(np.float64)
    rstd = 1 / np.sqrt((v**2).mean(1) + 1e-6)
    want = Expected(values=bf16(v * rstd[:, None] * w), atol=1.0)
    arrays = (x, w, np.zeros_like(x), np.zeros(ROWS, np.float32))
    return _launch(f"rmsnorm-{size}", sm, arrays, {2: want, 3: _near(rstd)})


def layernorm(size: str, sm: str) -> Launch:
    n = SIZES[size]
    x, w = _x(2, ROWS, n), _x(3, n)
    v = x.astype(np.float64)
    mean, rstd = v.mean(1, keepdims=True), 1 / np.sqrt(v.var(1, keepdims=True) + 1e-5)
    arrays = (x, w, np.zeros_like(x), np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32))
    expected = {2: _near((v - mean) * rstd * w, atol=1e-5), 3: _near(rstd[:, 0]), 4: _near(mean[:, 0])}
    return _launch(f"layernorm-{size}", sm, arrays, expected)


def softmax(size: str, sm: str) -> Launch:
    x = _x(4, ROWS, SIZES[size])
    return _launch(f"softmax-{size}", sm, (x, np.zeros_like(x)), {1: _near(_softmax(x), 2e-5, 1e-8)})


def softmax_backward(size: str, sm: str) -> Launch:
    dy, y = _x(5, ROWS, SIZES[size]), _softmax(_x(6, ROWS, SIZES[size])).astype(np.float32)
    want = y * (dy - (dy.astype(np.float64) * y).sum(1, keepdims=True))
    return _launch(f"softmax_backward-{size}", sm, (dy, y, np.zeros_like(dy)), {2: _near(want, 1e-4, 1e-7)})


def cross_entropy(size: str, sm: str) -> Launch:
    n = SIZES[size]
    x, target = _x(7, ROWS, n), np.array([0, n - 1, -100, 17, 200, 3, 3, 5], np.int64)
    v = x.astype(np.float64)
    lse = np.log(np.exp(v).sum(1))
    on = target >= 0
    at = np.where(on, target, 0)
    loss = np.where(on, lse - v[np.arange(ROWS), at], 0)
    grad = np.exp(v - lse[:, None])
    grad[np.arange(ROWS), at] -= 1
    grad[~on] = 0
    arrays = (x, target, np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32), np.zeros_like(x))
    expected = {2: _near(loss, 1e-5, 1e-5), 3: _near(lse), 4: _near(grad, 1e-4, 1e-7)}
    return _launch(f"cross_entropy-{size}", sm, arrays, expected)


def gemm(size: str, sm: str) -> Launch:
    m, n, k = EXTENTS[size]
    r = np.random.default_rng(8)
    a, b = r.integers(-4, 5, (1, m, k)), r.integers(-4, 5, (1, n, k))
    want = bf16((a @ b.transpose(0, 2, 1)).astype(np.float32))
    arrays = (bf16(a.astype(np.float32)), bf16(b.astype(np.float32)), np.zeros((1, m, n), np.uint16))
    return _launch(f"gemm-{size}", sm, arrays, {2: Expected(values=want)})


def cases() -> list[Case]:
    rows = [
        Case(name=f"{f.__name__}-{size}-{sm}", package="quack", build=partial(f, size, sm))
        for sm in SMS
        for f in (rmsnorm, layernorm, softmax, softmax_backward, cross_entropy)
        for size in SIZES
    ]
    products = [
        Case(name=f"gemm-{size}-{sm}", package="quack", build=partial(gemm, size, sm))
        for sm in SMS
        for size in EXTENTS
        if size != "pingpong" or sm == "sm_90a"
    ]
    return rows + products
