"""Errors survive what processes do to them."""

from __future__ import annotations

import copy
import pickle

import pytest
from kf_runtime import errors

ERRORS = (
    errors.CellKeyError("k"),
    errors.ArgumentError("eps", expected="a number", found="x"),
    errors.ManifestError("m", what="schema", expected=1, found=2),
    errors.CubinMissing("c", "0" * 64),
    errors.CubinCorrupt("c", expected="a", found="b"),
    errors.DriverUnavailable("cuInit", "no libcuda"),
    errors.DriverTooOld(sm="sm_90a", required=13000, found=12040),
    errors.DriverError("cuInit", result=3, name="CUDA_ERROR_NOT_INITIALIZED", text="said so"),
    errors.KernelNotLoaded(2),
    errors.JitUnknown("a", "b"),
    errors.JitToolchain("f", "none"),
    errors.JitFailed("f", "cell", "gcc"),
    errors.ForkedAfterUse(),
    errors.NotAdmitted("no cell"),
    errors.NoKernel("cell", "no cell"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_crosses_a_process_border(error: errors.KfError) -> None:
    """A pool's worker that raises one hands the same text and fields to its parent: an error that does not unpickle
    breaks the pool instead, and its cause is lost."""
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_no_error_is_left_out() -> None:
    """The list above holds every error of the module that is raised as it is."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KfError)}
    assert kinds - {type(error) for error in ERRORS} == {errors.KfError, errors.Unavailable}
