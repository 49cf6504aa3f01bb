"""A conformance case: a foreign kernel, its arguments, what it must produce; and what running it showed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kernel_factory.emulator import LaunchConfig, Memory, PtxError, load, run

MODES = ("lockstep", "warp-serial", "race")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The values of one output: equal to within ``atol + rtol |x|`` (both 0: equal)."""

    values: np.ndarray
    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Image:
    """A parameter by value with addresses in it: (offset, buffer name, addend) of each."""

    data: bytes
    slots: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: arrays are buffers in global memory; integers, floats, bytes and images are values.

    ``expected`` maps the place of an argument, or the name of a buffer, to what it must hold afterwards.
    """

    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple
    expected: dict[int | str, Expected]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    modes: tuple[str, ...] = MODES
    block_limit: int = 50_000_000
    buffers: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A name, the package that the kernel comes from, and how to get its launch."""

    name: str
    package: str
    build: Callable[[], Launch] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``verdict`` is right, wrong, finding, unsupported, crash (of the
    emulator) or failed (the compiler refused); ``detail`` says more."""

    verdict: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "right"


def attempt(case: Case) -> Outcome:
    """Compile and run a case in all of its modes."""
    try:
        launch = case.build()
    except Exception as error:  # a foreign compiler may raise anything; the reason is kept
        return Outcome(verdict="failed", detail=f"{type(error).__name__}: {str(error)[:400]}")
    try:
        kernel = load(launch.ptx).kernels[launch.kernel]
    except PtxError as error:
        return Outcome(verdict="unsupported", detail=str(error)[:400])
    for mode in launch.modes:
        try:
            outcome = _in_mode(kernel, launch, mode)
        except Exception as error:  # an emulator bug: reported by name, like every other outcome
            outcome = Outcome(verdict="crash", detail=f"{mode}: {type(error).__name__}: {error}")
        if not outcome.ok:
            return outcome
    return Outcome(verdict="right")


def _in_mode(kernel, launch: Launch, mode: str) -> Outcome:
    memory, result = run_launch(kernel, launch, mode)
    if result.findings:
        text = "; ".join(str(f).replace("\n", " ") for f in result.findings[:3])
        return Outcome(verdict="finding", detail=f"{mode}: {text[:600]}")
    for place, want in launch.expected.items():
        name = place if isinstance(place, str) else f"arg{place}"
        got = memory.read(name, want.values.dtype, want.values.shape)
        wrong = mismatch(got, want)
        if wrong:
            return Outcome(verdict="wrong", detail=f"{mode}: argument {place}: {wrong}")
    return Outcome(verdict="right")


def run_launch(kernel, launch: Launch, mode: str):
    """Run a launch on fresh memory: the memory it left, and what the emulator saw."""
    memory = Memory(seed=3)
    params = []
    for name, array in launch.buffers.items():
        memory.add(name, array)
    for param, argument, place in zip(kernel.params, _padded(kernel, launch.args), range(99), strict=False):
        if isinstance(argument, np.ndarray):
            params.append(memory.add(f"arg{place}", argument).to_bytes(8, "little"))
        elif isinstance(argument, Image):
            params.append(_filled(argument, memory))
        else:
            params.append(_scalar(argument, param.size))
    config = LaunchConfig(
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        dynamic_shared=launch.shared,
        params=tuple(params),
        block_limit=launch.block_limit,
    )
    return memory, run(kernel, config, memory, mode=mode, seed=5)


def _padded(kernel, args: tuple) -> list:
    """Trailing parameters that the launcher of a framework adds (scratch pointers) are null."""
    return [*args, *[0] * (len(kernel.params) - len(args))]


def _filled(image: Image, memory: Memory) -> bytes:
    out = bytearray(image.data)
    for offset, name, addend in image.slots:
        out[offset : offset + 8] = (memory.address(name) + addend).to_bytes(8, "little")
    return bytes(out)


def _scalar(value: object, size: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return np.float32(value).tobytes() if size == 4 else np.float64(value).tobytes()
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def mismatch(got: np.ndarray, want: Expected) -> str:
    """What differs, or an empty string."""
    if want.rtol == want.atol == 0:
        bad = got != want.values
        if got.dtype.kind == "f":
            bad &= ~(np.isnan(got) & np.isnan(want.values))
    else:
        x, y = got.astype(np.float64), want.values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            bad = ~((np.abs(x - y) <= want.atol + want.rtol * np.abs(y)) | (x == y) | (np.isnan(x) & np.isnan(y)))
    if not bad.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(bad))
    return f"{int(bad.sum())} of {bad.size} values differ; at {at} got {got[at]}, expected {want.values[at]}"


def bf16(x: np.ndarray) -> np.ndarray:
    """f32 to bf16 bits, nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
