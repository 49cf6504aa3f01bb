"""Foreign kernels on the emulator: ``pytest -m conformance tests/conformance`` with the [conformance] extra installed.

They are no part of the ordinary tests, since they need compilers that the project itself does not.
"""

from __future__ import annotations

import pytest

from .cases import Case, attempt
from .report import EXPLAINED, SOURCES, collect

pytestmark = pytest.mark.conformance


def _cases(config: pytest.Config) -> list:
    if "conformance" not in (config.option.markexpr or ""):
        return [pytest.param(None, id="foreign-kernels", marks=pytest.mark.skip("run with -m conformance"))]
    found, missing = collect(SOURCES)
    out = [pytest.param(case, id=f"{case.package}-{case.name}") for case in found]
    for name, reason in missing.items():
        out.append(pytest.param(None, id=name, marks=pytest.mark.skip(reason)))
    return out


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("case", _cases(metafunc.config))


def test_a_foreign_kernel_is_right_in_every_mode(case: Case):
    """Outputs agree with the formula and nothing is reported, or the reason is known by name."""
    outcome = attempt(case)
    if case.name in EXPLAINED:
        assert outcome.verdict == "finding" and "uninitialised-register" in outcome.detail
    else:
        assert outcome.ok, f"{outcome.verdict}: {outcome.detail}"
