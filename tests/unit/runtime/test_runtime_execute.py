"""An admitted call through dispatch, loader and executor, on a fake driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import kf_runtime
import pytest
import torch
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import DriverError
from runtime_fakes import IMAGE, FakeDriver, Result, operands, read_pointer, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "data", small_manifest())


@torch.no_grad()
def test_an_admitted_call_launches_the_plan_on_the_operands(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """The kernels see the tensors' own addresses, the output is what they wrote, and the counters rise."""
    install(wheel)
    tensors = operands(trimul_cell())
    seen: list[tuple[str, int, int]] = []
    copy = fake.on_launch

    def spy(function: str, parameters: int) -> None:
        seen.append((function, read_pointer(parameters, 0), read_pointer(parameters, 1)))
        if function == "finalize":
            ab = next(second for name, _, second in seen if name == "project")
            assert read_pointer(parameters, 2, 8) == ab + 16
        copy(function, parameters)

    fake.on_launch = spy
    out = kf_runtime.triangle_multiplicative_update(**tensors)
    assert [name for name, _, _ in seen] == ["project", "contract", "finalize"]
    (_, x0, ab0), (_, ab1, t1), (_, x2, out2) = seen
    assert x0 == x2 == tensors["x"].data_ptr() and out2 == out.data_ptr() and ab0 == ab1
    assert ab0 % 256 == t1 % 256 == 0 and abs(t1 - ab0) >= 2 * 2 * 16 * 64
    assert torch.equal(out.flatten()[:32], tensors["x"].flatten()[:32])
    status = kf_runtime.status()
    assert (status.hits, status.launches, status.generic) == (1, 3, {})


@torch.no_grad()
def test_later_calls_load_nothing_and_follow_the_operands(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """The second call of a signature makes three driver calls, the launches, and sees new addresses."""
    install(wheel)
    kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    fake.calls.clear()
    tensors = operands(trimul_cell(), seed=1)
    out = kf_runtime.triangle_multiplicative_update(**tensors)
    assert fake.calls == ["cuLaunchKernelEx"] * 3
    assert torch.equal(out.flatten()[:32], tensors["x"].flatten()[:32])
    assert fake.images == [IMAGE]


@torch.no_grad()
def test_changes_in_place_are_seen(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Nothing is cached by identity: strides, data and requires_grad are looked at on every call."""
    install(wheel)
    tensors = operands(trimul_cell())
    update = kf_runtime.triangle_multiplicative_update
    update(**tensors)
    fresh = torch.randn(1, 8, 8, 16).bfloat16()
    tensors["x"].data = fresh
    assert torch.equal(update(**tensors).flatten()[:32], fresh.flatten()[:32])
    assert kf_runtime.status().hits == 2
    tensors["p_in_weight"].data = torch.randn(16, 32).bfloat16().t()
    update(**tensors)
    assert kf_runtime.status().generic == {"strides": 1}
    tensors["p_in_weight"].data = torch.randn(32 * 16 + 1).bfloat16()[1:].view(32, 16)
    update(**tensors)
    assert kf_runtime.status().generic == {"strides": 1, "alignment": 1}
    tensors["p_in_weight"].data = torch.randn(32, 16).bfloat16()
    tensors["norm_out_bias"].requires_grad_(True)
    with torch.enable_grad():
        update(**tensors).sum().backward()
    assert kf_runtime.status().generic == {"strides": 1, "alignment": 1, "grad": 1}
    update(**tensors)
    assert kf_runtime.status().hits == 3


@torch.no_grad()
def test_float32_with_bfloat16_precision_runs_the_kernel(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """float32 inputs with precision="bfloat16" are rounded, run, and come back as float32."""
    install(wheel)
    tensors = {name: value.float() + 1e-4 for name, value in operands(trimul_cell()).items()}
    out = kf_runtime.triangle_multiplicative_update(**tensors, precision="bfloat16")
    assert out.dtype == torch.float32 and kf_runtime.status().hits == 1
    assert torch.equal(out.flatten()[:32], tensors["x"].bfloat16().float().flatten()[:32])


@torch.no_grad()
def test_leading_dimensions_fold_into_the_batch(fake: FakeDriver, install: Install, tmp_path: Path) -> None:
    """[2, 3, N, N, C] is the cell B=6, [N, N, C] the cell B=1, and the output keeps the rank."""
    install(write_wheel(tmp_path / "d", small_manifest(trimul_cell(B=6), trimul_cell())))
    tensors = operands(trimul_cell(B=6))
    tensors["x"], tensors["mask"] = tensors["x"].view(2, 3, 8, 8, 16), tensors["mask"].view(2, 3, 8, 8)
    assert kf_runtime.triangle_multiplicative_update(**tensors).shape == (2, 3, 8, 8, 16)
    tensors["x"], tensors["mask"] = tensors["x"][0, 0], tensors["mask"][0, 0]
    assert kf_runtime.triangle_multiplicative_update(**tensors).shape == (8, 8, 16)
    assert kf_runtime.status().hits == 2


@torch.no_grad()
def test_any_mask_dtype_reaches_the_kernel(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Boolean, integer and float32 masks are rounded to BF16 as in the formula."""
    install(wheel)
    tensors = operands(trimul_cell())
    for dtype in (torch.bool, torch.int32, torch.float32):
        kf_runtime.triangle_multiplicative_update(**{**tensors, "mask": tensors["mask"].to(dtype)})
    assert kf_runtime.status().hits == 3


@torch.no_grad()
@pytest.mark.parametrize("before", [False, True])
def test_an_operand_without_memory_reaches_no_kernel(
    fake: FakeDriver, install: Install, wheel: Path, before: bool
) -> None:
    """A placeholder takes the generic path, a parameter whose storage was freed is an error: no address to launch with.

    An address of 0 is aligned to everything: the good call before it, and the one after, run the kernel.
    """
    install(wheel)
    tensors, update = operands(trimul_cell()), kf_runtime.triangle_multiplicative_update
    if before:
        update(**tensors)
    update(**{**tensors, "mask": torch._efficientzerotensor((1, 8, 8), dtype=torch.bfloat16)})
    freed = tensors["p_in_weight"].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(kf_runtime.ArgumentError, match="p_in_weight: expected a tensor with memory"):
        update(**{**tensors, "p_in_weight": freed})
    assert len(fake.launches) == 3 * before and kf_runtime.status().generic == {"memory": 1}
    update(**tensors)
    assert len(fake.launches) == 3 * before + 3


@torch.no_grad()
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_parameter_is_left_to_torch(
    fake: FakeDriver, install: Install, wheel: Path, layout: torch.layout, before: bool
) -> None:
    """No kernel reads a sparse weight: the generic path does, as far as torch goes, and explain names it."""
    install(wheel)
    tensors, update = operands(trimul_cell()), kf_runtime.triangle_multiplicative_update
    if before:
        update(**tensors)
    sparse = {**tensors, "p_out_weight": tensors["p_out_weight"].to_sparse(layout=layout)}
    route = kf_runtime.explain("triangle_multiplicative_update", **sparse)
    assert "p_out_weight: expected a dense tensor" in str(route)
    with contextlib.suppress(RuntimeError):
        update(**sparse)
    assert len(fake.launches) == 3 * before and kf_runtime.status().generic == {"memory": 1}


@torch.no_grad()
def test_a_launch_failure_surfaces_at_the_call(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """A failed launch raises DriverError with the result's name; it never turns into a generic answer."""
    install(wheel)
    fake.results["cuLaunchKernelEx"] = [Result.CUDA_ERROR_LAUNCH_FAILED]
    with pytest.raises(DriverError, match=r"CUDA_ERROR_LAUNCH_FAILED.*said by the fake"):
        kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))


@torch.no_grad()
def test_a_thread_without_a_context_gets_one(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """CUDA_ERROR_INVALID_CONTEXT makes the primary context current and launches again."""
    install(wheel)
    fake.context = 0
    fake.results["cuLaunchKernelEx"] = [Result.CUDA_ERROR_INVALID_CONTEXT]
    kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    assert fake.context == 7 and kf_runtime.status().launches == 3


@torch.no_grad()
def test_threads_do_not_see_each_others_addresses(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Eight threads at once, each with its own input, each gets its own answer; hits add up."""
    install(wheel)
    wrong: list[int] = []

    def work(seed: int) -> None:
        tensors = operands(trimul_cell(), seed=seed)
        for _ in range(50):
            out = kf_runtime.triangle_multiplicative_update(**tensors)
            if not torch.equal(out.flatten()[:32], tensors["x"].flatten()[:32]):
                wrong.append(seed)

    def run(seed: int) -> None:
        with torch.no_grad():
            work(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and kf_runtime.status().hits == 400


@torch.no_grad()
def test_off_makes_no_driver_call(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Mode off: no driver call, no cubin read, and the reason is counted."""
    install(wheel, Mode.OFF)
    kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    assert fake.calls == [] and kf_runtime.status().generic == {"off": 1}


@torch.no_grad()
def test_a_cluster_is_a_launch_attribute(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """A launch with a cluster carries the attribute, others carry none."""
    install(wheel)
    kf_runtime.triangle_multiplicative_update(**operands(trimul_cell()))
    counts = {function: config.numAttrs for function, _, config in fake.launches}
    assert counts == {"project": 0, "contract": 1, "finalize": 0}
    config = fake.launches[1][2]
    assert config.attrs[0].value.clusterDim.x == 2 and config.sharedMemBytes == 1024
