"""Importing: lazy, quick, and without a driver, a GPU or a writable home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[3] / "runtime"


def python(code: str, **environment: str) -> str:
    """The output of ``code`` in a fresh interpreter that finds this checkout's runtime."""
    variables = {**os.environ, "PYTHONPATH": str(RUNTIME), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_records_load_no_torch() -> None:
    """Records and decisions import neither torch nor cuda.bindings."""
    modules = ", ".join(
        f"kf_runtime.{m}" for m in ["cell", "plan", "manifest", "route", "errors", "system", "campaign"]
    )
    assert python(f"import sys, {modules}; print([m for m in ('torch', 'cuda.bindings') if m in sys.modules])") == "[]"


def test_import_needs_no_driver_and_no_home() -> None:
    """Every module imports without mapping libcuda, with a home that does not exist, and KF off or unknown."""
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import kf_runtime, torch\n"
        "for name in kf_runtime.__all__: getattr(kf_runtime, name)\n"
        "print('libcuda.so' in open('/proc/self/maps').read(), kf_runtime.status().mode)"
    )
    assert python(code, HOME="/nonexistent", CUEQ_TRIMUL_KF_CAMPAIGN="off") == "False off"
    assert python(code, HOME="/nonexistent", CUEQ_TRIMUL_KF_CAMPAIGN="odd") == "False auto"


def test_import_loads_nothing_beyond_torch() -> None:
    """Where torch is loaded, importing the op loads kf_runtime's own modules alone: no compiler, no second library."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import kf_runtime; kf_runtime.triangle_multiplicative_update\n"
        "print(sorted(m for m in set(sys.modules) - before if m.partition('.')[0] != 'kf_runtime'))"
    )
    assert python(code) == "[]"


def test_a_missing_driver_is_a_typed_reason() -> None:
    """Without libcuda, asking for the system gives DriverUnavailable with the true cause chained."""
    code = (
        "from kf_runtime import driver\n"
        "from kf_runtime.errors import DriverUnavailable\n"
        "try: driver.detect()\n"
        "except DriverUnavailable as error: print(type(error.__cause__).__name__, error)\n"
        "else: print('a driver is here')"
    )
    text = python(code)
    assert text == "a driver is here" or "no usable CUDA driver" in text


def test_unknown_names_are_attribute_errors() -> None:
    """The lazy package still refuses what it does not have."""
    import kf_runtime

    with pytest.raises(AttributeError, match="nothing_like_it"):
        kf_runtime.nothing_like_it  # noqa: B018
    assert "explain" in dir(kf_runtime)
