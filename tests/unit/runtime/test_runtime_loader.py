"""The loader: hashed bytes are the loaded bytes; each cubin and kernel is loaded once a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from kf_runtime import driver
from kf_runtime.errors import CubinCorrupt, CubinMissing, DriverError, DriverUnavailable
from kf_runtime.loader import Loader, read_cubin
from runtime_fakes import IMAGE, SHA, FakeDriver, Result, small_manifest, trimul_cell, trimul_plan, write_wheel


def test_the_hashed_bytes_reach_the_driver_once(fake: FakeDriver, tmp_path: Path) -> None:
    """Two plans on one cubin: one load of exactly the proved bytes, each kernel prepared once."""
    loader = Loader(small_manifest(), write_wheel(tmp_path / "d", small_manifest()), 0)
    first = loader.functions(trimul_plan(trimul_cell()))
    assert loader.functions(trimul_plan(trimul_cell(N=9))) == first == ("project", "contract", "finalize")
    assert fake.images == [IMAGE]
    assert fake.calls.count("cuFuncLoad") == fake.calls.count("cuKernelSetAttribute") == 3


@pytest.mark.parametrize("image", [b"", IMAGE[:-1], IMAGE + b"\0", b"X" + IMAGE[1:]])
def test_other_bytes_never_reach_the_driver(fake: FakeDriver, tmp_path: Path, image: bytes) -> None:
    """Truncated, extended or changed cubins raise CubinCorrupt, with both hashes, before any load."""
    found = small_manifest()
    folder = write_wheel(tmp_path / "d", found)
    (folder / "cubins" / f"{SHA}.cubin").write_bytes(image)
    with pytest.raises(CubinCorrupt, match=SHA):
        Loader(found, folder, 0).functions(trimul_plan(trimul_cell()))
    assert fake.images == []


def test_a_missing_cubin(tmp_path: Path) -> None:
    """A cubin that is not there raises CubinMissing with its path and the cause chained."""
    record = small_manifest().cubins[SHA]
    with pytest.raises(CubinMissing, match="reinstall kf-runtime") as caught:
        read_cubin(tmp_path, record)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_driver_errors_carry_name_and_text(fake: FakeDriver) -> None:
    """A failing driver call says which, the result's name and number, and the driver's own text."""
    fake.results["cuDeviceGetName"] = [Result.CUDA_ERROR_LAUNCH_FAILED]
    with pytest.raises(DriverError, match=r"cuDeviceGetName.*CUDA_ERROR_LAUNCH_FAILED \(719\): said by the fake"):
        driver.detect()


def test_a_driver_that_does_not_initialise_is_unavailable(fake: FakeDriver) -> None:
    """cuInit failing means no usable driver, with the driver's answer chained."""
    fake.results["cuInit"] = [Result.CUDA_ERROR_LAUNCH_FAILED]
    with pytest.raises(DriverUnavailable) as caught:
        driver.detect()
    assert isinstance(caught.value.__cause__, DriverError)


def test_detect(fake: FakeDriver) -> None:
    """The System is what the driver says."""
    system = driver.detect()
    assert (system.product, system.sm, system.driver_version, system.host_is_device) == (
        "KF Emulated sm_90a", "sm_90a", 13000, True,
    )  # fmt: skip
