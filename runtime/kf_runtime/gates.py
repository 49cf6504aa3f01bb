"""Gates: what stands between a call and its kernel, in the order in which a call meets them."""

from __future__ import annotations

from typing import Final

#: Each gate with the reason codes that it gives.
GATES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("mode", ("off",)),
    ("dtype", ("dtype",)),
    ("precision", ("precision",)),
    ("grad", ("grad",)),
    ("tracing", ("tracing",)),
    ("device", ("cpu", "device")),
    ("driver", ("driver_unavailable", "driver_too_old", "driver_error")),
    ("manifest", ("manifest",)),
    ("product", ("sm", "product")),
    ("parameters", ("weights", "biases", "eps", "autocast", "operands")),
    ("shape", ("empty", "cell", "shape")),
    ("accuracy", ("parameter_dtype",)),
    ("strides", ("strides",)),
    ("alignment", ("alignment", "memory")),
    ("grid barrier", ("grid_barrier",)),
    ("cubins", ("cubin_missing", "cubin_corrupt", "kernel_not_loaded")),
    ("capture", ("capturing",)),
)


def gate_of(code: str) -> str:
    """The gate that gives a reason code; the code itself where none does."""
    return next((name for name, codes in GATES if code in codes), code)


def walk(code: str | None) -> str:
    """The gates that a call passed and the one that decided, by its reason code; None: it passed every one."""
    names = [name for name, _ in GATES]
    if code is None:
        return f"passed: {', '.join(names)}"
    gate = gate_of(code)
    passed = names[: names.index(gate)] if gate in names else []
    return f"passed: {', '.join(passed) or 'none'}; decided by: {gate}"
