"""CUEQ_TRIMUL_KF_CAMPAIGN: every spelling, in any case."""

from __future__ import annotations

import warnings

import pytest
from kf_runtime.campaign import Mode, read_environment


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        *[(t, Mode.AUTO) for t in ("", "auto", "1", "true", "on", "yes", "AUTO", " True ")],
        *[(t, Mode.OFF) for t in ("0", "false", "off", "no", "Off", "NO")],
        *[("FORCE", Mode.FORCE), ("preview", Mode.PREVIEW), ("Preview", Mode.PREVIEW)],
    ],
)
def test_spellings(text: str, mode: Mode) -> None:
    """Each documented spelling gives its mode without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_environment({"CUEQ_TRIMUL_KF_CAMPAIGN": text}).mode is mode


def test_unset_is_auto_and_anything_else_warns_once() -> None:
    """Unset means auto; an unknown value is one warning that names it, then auto."""
    assert read_environment({}).mode is Mode.AUTO
    with pytest.warns(RuntimeWarning, match="found 'fast'") as caught:
        assert read_environment({"CUEQ_TRIMUL_KF_CAMPAIGN": "fast"}).mode is Mode.AUTO
    assert len(caught) == 1


def test_jit_is_read_in_the_same_place() -> None:
    """KF_JIT is a setting as well."""
    assert read_environment({"KF_JIT": "1"}).jit == "1"
