"""A short, seeded run of tools/fuzz_ptx.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "fuzz_ptx.py"


@pytest.fixture(scope="module")
def tool():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("fuzz_ptx", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mangled_text_is_refused_clearly_or_loads(tool):
    """Five seconds at most of mangled PTX: no exception but PtxError, and no hang."""
    counts, failures = tool.fuzz(tool.corpus([]), 5, seed=11, most=2000)
    assert not failures
    assert counts["refused"] and counts["loads"]


@pytest.mark.parametrize(
    "text",
    ["", "\0", ".section", ".version 9.3\n.target sm_80\n" + "{" * 5000, ".target sm_80\n.func", "/*", ".entry k("],
)
def test_texts_that_once_stumbled(tool, text):
    """Cut-off and nested texts are refused."""
    assert tool.attempt(text) == "refused"
