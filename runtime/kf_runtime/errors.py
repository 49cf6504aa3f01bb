"""Typed errors of the runtime. Each says what, expected, found and the next step."""

from __future__ import annotations

from typing import Any


class KfError(Exception):
    """Base of every error that this package raises on purpose. Copies and pickles, so that workers can hand it on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), vars(self)


def _again(kind: type[KfError], arguments: tuple[Any, ...]) -> KfError:
    """An error with this text; its own ``__init__`` makes the text from other arguments."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class CellKeyError(KfError, ValueError):
    """A text that is no cell key."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"not a cell key: {key!r}; expected "
            "op/phase/dtype.param_dtype/B#.N#.C#.D#/direction/mask|nomask/bias|nobias/sm_#; "
            "`kf cells` and `python -m kf_runtime list` print valid keys"
        )


class ArgumentError(KfError, ValueError):
    """An argument of an op is outside its domain. Names the argument, what was expected and what came."""

    def __init__(self, argument: str, *, expected: str, found: object) -> None:
        self.argument = argument
        super().__init__(f"{argument}: expected {expected}; found {found}")


class Unavailable(KfError):
    """A kernel that should run here cannot. ``code`` is the reason's short name in ``status()``."""

    code = "unavailable"


class ManifestError(Unavailable):
    """The manifest of the wheel is missing, damaged or of another version."""

    code = "manifest"

    def __init__(self, path: object, *, what: str, expected: object, found: object) -> None:
        super().__init__(
            f"{path}: {what}: expected {expected}; found {found}; "
            "reinstall kf-runtime, or run `make factory` in a checkout; `python -m kf_runtime verify` checks every file"
        )


class CubinMissing(Unavailable):
    """A cubin that the manifest lists is not in the wheel."""

    code = "cubin_missing"

    def __init__(self, path: object, sha256: str) -> None:
        super().__init__(
            f"{path}: no such cubin; expected the file with sha256 {sha256}; reinstall kf-runtime, "
            "or run `make factory` in a checkout"
        )


class CubinCorrupt(Unavailable):
    """A cubin whose bytes are not the proved ones. They never reach the driver."""

    code = "cubin_corrupt"

    def __init__(self, path: object, *, expected: str, found: str) -> None:
        super().__init__(
            f"{path}: not the bytes that were proved: expected sha256 {expected}; found {found}; reinstall kf-runtime"
        )


class DriverUnavailable(Unavailable):
    """No usable CUDA driver. The true cause is chained."""

    code = "driver_unavailable"

    def __init__(self, call: str, cause: object) -> None:
        super().__init__(
            f"{call}: no usable CUDA driver: {cause}; install or update the NVIDIA display driver; "
            "without one every call runs the generic path"
        )


class DriverTooOld(Unavailable):
    """The driver is older than the cubins' toolchain demands."""

    code = "driver_too_old"

    def __init__(self, *, sm: str, required: int, found: int) -> None:
        super().__init__(
            f"the {sm} cubins: expected a driver of CUDA {version_text(required)} or newer; "
            f"found {version_text(found)}; update the NVIDIA display driver"
        )


class DriverError(Unavailable):
    """A driver call failed. ``result`` is the CUresult as a number, ``name`` its name."""

    code = "driver_error"

    def __init__(self, call: str, *, result: int, name: str, text: str) -> None:
        self.call, self.result, self.name = call, result, name
        super().__init__(f"{call}: expected CUDA_SUCCESS; found {name} ({result}): {text}")


class KernelNotLoaded(Unavailable):
    """cuFuncLoad succeeded and cuFuncIsLoaded does not say so: a later launch might load, even while capturing."""

    code = "kernel_not_loaded"

    def __init__(self, state: int) -> None:
        super().__init__(
            f"cuFuncIsLoaded: expected 1 (loaded) after cuFuncLoad; found {state}; unset CUDA_MODULE_LOADING, "
            "or update the NVIDIA display driver"
        )


class JitUnknown(Unavailable):
    """KF_JIT names a family that no installed provider has."""

    code = "jit_family"

    def __init__(self, asked: str, known: str) -> None:
        super().__init__(
            f"KF_JIT: expected families among {known or 'none (no provider is installed)'}; found {asked}; "
            "correct KF_JIT or unset it"
        )


class JitToolchain(Unavailable):
    """The versions that a JIT form needs are not installed."""

    code = "jit_toolchain"

    def __init__(self, family: str, problem: str) -> None:
        super().__init__(f"the JIT form of {family}: {problem}")


class JitFailed(Unavailable):
    """A JIT form could not be compiled, loaded or launched. The cause is chained."""

    code = "jit_failed"

    def __init__(self, family: str, cell: object, what: str) -> None:
        super().__init__(f"the JIT form of {family} for {cell}: {what}")


class ForkedAfterUse(KfError):
    """A process forked after KF had used the driver: no handle and no context survives a fork."""

    def __init__(self) -> None:
        super().__init__(
            "this process was forked after kf_runtime had used the CUDA driver; expected a fork before first use, "
            'or a new process; start workers with multiprocessing.get_context("spawn")'
        )


class NotAdmitted(KfError):
    """Mode ``force``: a call that KF could take by dtype is outside the admitted cells."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"CUEQ_TRIMUL_KF_CAMPAIGN=force, but this call runs no kernel: {reason}; "
            "use `auto` to run the generic path instead"
        )


class NoKernel(KfError):
    """``preload`` was asked for a cell that does not run here."""

    def __init__(self, cell: object, reason: str) -> None:
        super().__init__(f"{cell}: expected a cell that runs on this device; found: {reason}")


def version_text(version: int) -> str:
    """A CUDA version number as text: 13000 is 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"
