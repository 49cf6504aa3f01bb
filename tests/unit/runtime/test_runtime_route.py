"""Route decisions as a table, and what a declined call costs under each mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import manifest, route
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import CubinCorrupt, DriverTooOld, ManifestError, NotAdmitted, Unavailable
from kf_runtime.route import Call, Generic, Operand, UseCubin
from kf_runtime.system import System, sm_of
from runtime_fakes import SHA, FakeDriver, Result, operands, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]
H200 = System(product="NVIDIA H200", capability=(9, 0), driver_version=13000, ordinal=0)
EMULATED = System(product="KF Emulated sm_90a", capability=(9, 0), driver_version=13000, ordinal=0)
A10 = System(product="NVIDIA A10", capability=(8, 6), driver_version=13000, ordinal=0)


def call(system: System, **changes: Any) -> Call:
    """A well-formed call of the small cell; ``changes`` replace operands."""
    cell = trimul_cell(sm=system.sm)
    found = {
        b.name: Operand(dtype=b.dtype, shape=b.shape, strides=b.strides, address=1 << 20)
        for b in next(iter(small_manifest().plans.values())).named("input")
    }
    return Call(op=cell.op, cell=cell, operands={**found, **changes})


@pytest.mark.parametrize(
    ("system", "mode", "code"),
    [
        (EMULATED, Mode.AUTO, None),
        (EMULATED, Mode.FORCE, None),
        (H200, Mode.AUTO, "product"),
        (H200, Mode.PREVIEW, None),
        (H200, Mode.FORCE, None),
        (H200, Mode.OFF, "off"),
        (A10, Mode.AUTO, "sm"),
        (A10, Mode.PREVIEW, "sm"),
        (A10, Mode.FORCE, "sm"),
        (replace(H200, driver_version=12040), Mode.PREVIEW, "driver_too_old"),
    ],
)
def test_products_and_modes(system: System, mode: Mode, code: str | None) -> None:
    """auto needs a product that the evidence names; preview and force take any entry of the SM."""
    decided = route.decide(call(system), small_manifest(required_driver=12080), system, mode)
    assert (None if isinstance(decided, UseCubin) else decided.reason.code) == code


W = Operand(dtype="bf16", shape=(32, 16), strides=(16, 1), address=1 << 20)


@pytest.mark.parametrize(
    ("operand", "code"),
    [
        (W, None),
        (replace(W, strides=(1, 32)), "strides"),
        (replace(W, dtype="f32"), "dtype"),
        (replace(W, shape=(16, 32)), "shape"),
        (replace(W, address=(1 << 20) + 8), "alignment"),
        (replace(W, address=(1 << 20) + 32), None),
    ],
)
def test_operands_must_be_the_plans(operand: Operand, code: str | None) -> None:
    """dtype, shape, strides and alignment of each operand are compared with the plan's buffer table."""
    decided = route.decide(call(EMULATED, p_in_weight=operand), small_manifest(), EMULATED, Mode.AUTO)
    assert (None if isinstance(decided, UseCubin) else decided.reason.code) == code
    if isinstance(decided, Generic):
        assert "p_in_weight" in str(decided) and decided.reason.binding


def test_a_call_outside_the_cells_names_the_nearest() -> None:
    """The reason prints the cell that was asked for and the nearest admitted one."""
    asked = replace(call(EMULATED), cell=trimul_cell(N=9))
    decided = route.decide(asked, small_manifest(), EMULATED, Mode.AUTO)
    assert isinstance(decided, Generic) and decided.reason.nearest == trimul_cell()
    assert ".N9." in str(decided) and ".N8." in str(decided)


def test_sm_names() -> None:
    """Compute capabilities spell SMs as cells do; one without cells keeps its own name."""
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    assert [sm_of(c) for c in capabilities] == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]


def test_host_tensors_count_on_the_emulated_product_only() -> None:
    """The one seam: a product named KF Emulated, and nothing else."""
    assert EMULATED.host_is_device and not H200.host_is_device
    assert not replace(H200, product="My KF Emulated card").host_is_device


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "data", small_manifest())


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "cell": ({"x": torch.zeros(1, 9, 9, 16).bfloat16(), "mask": None}, True),
    "weights": ({"norm_in_bias": None}, True),
    "biases": ({"p_out_bias": torch.zeros(16).bfloat16()}, True),
    "eps": ({"eps": 1e-6}, True),
    "strides": ({"x": torch.zeros(1, 8, 8, 16).bfloat16().transpose(1, 2)}, True),
    "empty": ({"x": torch.zeros(1, 0, 0, 16).bfloat16(), "mask": None}, True),
    "dtype": ({"x": torch.zeros(1, 8, 8, 16), "precision": None, "norm_in_bias": None}, False),
}


@pytest.mark.parametrize("code", list(CASES))
@torch.no_grad()
def test_declined_calls_are_counted_explained_and_forced(
    fake: FakeDriver, install: Install, wheel: Path, code: str
) -> None:
    """A declined call: counted by reason, explained alike, and an error under force where KF takes its kind."""
    changes, binding = CASES[code]
    tensors = {**operands(trimul_cell()), **changes}
    if code == "dtype":
        tensors = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in tensors.items()}
    install(wheel)
    for _ in range(2):
        kf_runtime.triangle_multiplicative_update(**tensors)
    assert kf_runtime.status().generic == {code: 2} and fake.launches == []
    explained = kf_runtime.explain("triangle_multiplicative_update", **tensors)
    assert isinstance(explained, Generic) and explained.reason.code == code
    install(wheel, Mode.FORCE)
    if binding:
        with pytest.raises(NotAdmitted, match=f"force.*{code}"):
            kf_runtime.triangle_multiplicative_update(**tensors)
    else:
        kf_runtime.triangle_multiplicative_update(**tensors)


@torch.no_grad()
def test_force_keeps_what_kf_never_takes(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Under force, calls with grad and calls on another SM keep the generic path; an admitted one runs."""
    install(wheel, Mode.FORCE)
    tensors = operands(trimul_cell())
    kf_runtime.triangle_multiplicative_update(**tensors)
    with torch.enable_grad():
        kf_runtime.triangle_multiplicative_update(**{**tensors, "x": tensors["x"].clone().requires_grad_()})
    assert (kf_runtime.status().hits, kf_runtime.status().generic) == (1, {"grad": 1})
    fake.capability = (8, 6)
    install(wheel, Mode.FORCE)
    kf_runtime.triangle_multiplicative_update(**tensors)
    assert kf_runtime.status().generic == {"sm": 1}


@torch.no_grad()
def test_autocast(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """BF16 autocast changes nothing for a BF16 call; float16 autocast declines it."""
    install(wheel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    with torch.autocast("cpu", dtype=torch.float16):
        kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    assert (kf_runtime.status().hits, kf_runtime.status().generic) == (1, {"autocast": 1})


def test_a_real_gpu_never_sees_host_tensors(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """On any product but an emulated one, host tensors take the generic path, whatever the mode."""
    fake.product = "NVIDIA H200"
    for mode in (Mode.AUTO, Mode.PREVIEW, Mode.FORCE):
        install(wheel, mode)
        with torch.no_grad():
            kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
        assert kf_runtime.status().generic == {"cpu": 1}
    assert fake.launches == []


def test_without_a_mapped_driver_host_tensors_ask_nothing(
    fake: FakeDriver, install: Install, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU call initialises no driver where none is in the process yet."""
    monkeypatch.setattr("kf_runtime.driver.is_mapped", lambda: False)
    install(wheel)
    with torch.no_grad():
        kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    assert fake.calls == []


def corrupt(folder: Path) -> None:
    (folder / "cubins" / f"{SHA}.cubin").write_bytes(b"\x7fELF something else")


def missing(folder: Path) -> None:
    (folder / "cubins" / f"{SHA}.cubin").unlink()


def other_version(folder: Path) -> None:
    data = manifest.to_bytes(small_manifest()).replace(b'"schema":1', b'"schema":9')
    (folder / manifest.FILE).write_bytes(data)
    (folder / manifest.SIDECAR).write_bytes(manifest.sidecar(data))


def old_driver(folder: Path) -> None:
    data = manifest.to_bytes(small_manifest(required_driver=14000))
    (folder / manifest.FILE).write_bytes(data)
    (folder / manifest.SIDECAR).write_bytes(manifest.sidecar(data))


@pytest.mark.parametrize(
    ("damage", "code", "error"),
    [
        (corrupt, "cubin_corrupt", CubinCorrupt),
        (missing, "cubin_missing", Unavailable),
        (other_version, "manifest", ManifestError),
        (old_driver, "driver_too_old", DriverTooOld),
        (None, "driver_error", Unavailable),
    ],
)
def test_unusable_kernels_fall_back_loudly(
    fake: FakeDriver, install: Install, wheel: Path, damage: Any, code: str, error: type[Exception]
) -> None:
    """Generic path, one warning with cause and cure, counted by status(); under force the typed error itself."""
    if damage:
        damage(wheel)
    else:
        fake.results["cuLibraryLoadData"] = [Result.CUDA_ERROR_NO_BINARY_FOR_GPU] * 9
    install(wheel)
    tensors = operands(trimul_cell())
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            kf_runtime.triangle_multiplicative_update(**tensors)
    assert [str(w.message)[:15] for w in caught] == ["kf_runtime runs"]
    status = kf_runtime.status()
    assert status.generic == {code: 3} and [f.code for f in status.failures] == [code]
    assert code != "cubin_corrupt" or fake.images == []
    install(wheel, Mode.FORCE)
    with torch.no_grad(), pytest.raises(error):
        kf_runtime.triangle_multiplicative_update(**tensors)


def test_shape_query_agrees_with_the_call(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """The shape query is True exactly for admitted shapes, from metadata alone."""
    install(wheel)
    query = kf_runtime.triangle_multiplicative_update_inference_shape_is_supported
    assert query((1, 8, 8, 16), 16) and query((8, 8, 16), 16)
    assert not query((2, 8, 8, 16), 16) and not query((1, 8, 8, 16), 32)
    assert not query((1, 8, 8, 16), 16, "incoming") and not query((1, 8, 8, 16), 16, has_mask=False)
    assert not query((1, 8, 8, 16), 16, has_bias=True) and not query((1, 8, 8, 16), 16, dtype=torch.float32)
    assert not query((1, 8, 8, 16), 16, param_dtype=torch.float32) and not query((1, 0, 0, 16), 16)
    install(wheel, Mode.OFF)
    assert not query((1, 8, 8, 16), 16)


@pytest.mark.parametrize(("product", "host"), [("KF Emulated sm_90a", True), ("NVIDIA H200", False)])
def test_shape_query_knows_where_the_tensors_will_be(
    fake: FakeDriver, install: Install, tmp_path: Path, product: str, host: bool
) -> None:
    """A kernel reads CUDA tensors, and host tensors on an emulated driver alone, whatever the machine's GPU admits."""
    fake.product = product
    install(write_wheel(tmp_path / "data", small_manifest(product=product)))
    query = kf_runtime.triangle_multiplicative_update_inference_shape_is_supported
    assert query((1, 8, 8, 16), 16, device="cuda") and query((1, 8, 8, 16), 16, device=0)
    assert query((1, 8, 8, 16), 16, device="cpu") == host
    assert not query((1, 8, 8, 16), 16, device="meta") and not query((1, 8, 8, 16), 16, device=torch.device("mps"))


def test_preload_names_what_is_no_cell(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """A list of keys instead of keys is an error that says so, and nothing is loaded."""
    install(wheel)
    with pytest.raises(kf_runtime.ArgumentError, match="cells: expected Cells or their keys, each an argument"):
        kf_runtime.preload([trimul_cell().key])  # type: ignore[arg-type]
    assert fake.images == []


@torch.no_grad()
def test_explain_of_an_admitted_call(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """explain gives UseCubin with cell, hashes and product, and neither loads nor launches."""
    install(wheel)
    decided = kf_runtime.explain("triangle_multiplicative_update", **operands(trimul_cell()))
    assert isinstance(decided, UseCubin) and decided.cell == trimul_cell()
    assert SHA[:12] in str(decided) and "KF Emulated sm_90a (emulated)" in str(decided)
    assert fake.images == [] and fake.launches == []


def test_a_grid_barrier_is_declined() -> None:
    """A plan whose kernel synchronises its blocks through global memory is not dispatched: unknown means generic."""
    found = small_manifest()
    (digest, plan), *_ = found.plans.items()
    launches = (replace(plan.launches[0], grid_barrier=True), *plan.launches[1:])
    marked = replace(found, plans={digest: replace(plan, launches=launches)})
    decided = route.decide(call(EMULATED), marked, EMULATED, Mode.AUTO)
    assert isinstance(decided, Generic) and decided.reason.code == "grid_barrier" and "project" in str(decided)
