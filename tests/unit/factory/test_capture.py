"""Capture: the DSL's own host code, run on stand-ins, gives a launch that a later run obeys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kf_runtime.cell import Cell

from kernel_factory import capture, elf, inspect, pipeline
from kernel_factory.built import BuiltCell
from kernel_factory.family import CellPlan, Step, discover
from kernel_factory.pipeline import Selection


def _host(selection: Selection, built: BuiltCell, index: int) -> tuple[capture.HostCode, Step]:
    store, artifact = selection.workspace.store, built.artifacts[index]
    kernel = inspect.only_kernel(store.blob(artifact.cubin), artifact.symbol)
    host = capture.HostCode(
        object_bytes=store.blob(artifact.host),
        entry=artifact.entry,
        cubin=artifact.cubin,
        kernel=kernel,
        sm=artifact.sm,
    )
    return host, discover()[built.family].plan(built.cell).steps[index]


def test_a_plan_that_changes_is_captured_again(selection: Selection, built: list[BuiltCell]) -> None:
    """Other run-time integers for the same cubin are another launch, not the one that the store remembers."""
    (family, cell), *_ = selection.rows

    def smaller(asked: Cell) -> CellPlan:
        plan = family.plan(asked)
        first, *rest = plan.steps
        return replace(plan, steps=(replace(first, scalars=(32, *first.scalars[1:])), *rest))

    changed = replace(selection, rows=((replace(family, plan=smaller), cell),))
    with ThreadPoolExecutor(1) as pool:
        (found,) = pipeline.build(changed, pool, lambda *_: None, lambda *_: None)
    before = next(known for known in built if known.cell == cell)
    assert found.artifacts == before.artifacts
    assert found.plan.launches[0] != before.plan.launches[0] and found.plan.launches[1:] == before.plan.launches[1:]


@pytest.mark.parametrize("index", range(3))
def test_every_operand_has_a_slot(selection: Selection, built: list[BuiltCell], index: int) -> None:
    """Each pointer that the host function takes arrives in the images, and nothing else does."""
    host, step = _host(selection, built[0], index)
    launch = capture.capture(host, step)
    assert {slot.buffer for slot in launch.slots} == set(step.operands)


def test_images_obey_fresh_addresses(selection: Selection, built: list[BuiltCell]) -> None:
    """A fourth run of the host code, with addresses never seen before, equals the filled images."""
    host, step = _host(selection, built[0], 0)
    launch = capture.capture(host, step)
    addresses = {name: 0x1234_5678_0000 + (i << 20) for i, name in enumerate(step.operands)}
    recorded = capture._recorder(host)(step, addresses, 0x77)
    assert launch.images_at(addresses) == recorded.images


def test_scalars_reach_grid_and_images(selection: Selection, built: list[BuiltCell]) -> None:
    """Another N gives another grid and other parameter bytes from the same cubin."""
    host, step = _host(selection, built[0], 1)
    here, there = capture.capture(host, step), capture.capture(host, replace(step, scalars=(640, *step.scalars[1:])))
    assert here.grid != there.grid
    assert here.images != there.images


def test_two_equal_operands_are_told_apart(selection: Selection, built: list[BuiltCell]) -> None:
    """Slots of different buffers carry different names even where buffers have one size."""
    host, step = _host(selection, built[0], 0)
    slots = capture.capture(host, step).slots
    assert len({(slot.parameter, slot.offset) for slot in slots}) == len(slots)


def test_shared_memory_over_the_limit_is_refused(selection: Selection, built: list[BuiltCell]) -> None:
    """A launch that asks for more than the SM has names both figures and the cure."""
    host, step = _host(selection, built[0], 0)
    fat = replace(host, kernel=replace(host.kernel, static_shared=400_000))
    with pytest.raises(capture.CaptureError, match="smaller tile"):
        capture.capture(fat, step)


def test_a_broken_host_object_is_a_clear_error(selection: Selection, built: list[BuiltCell]) -> None:
    """Bytes that gcc cannot link end in gcc's own words."""
    host, step = _host(selection, built[0], 0)
    with pytest.raises(capture.CaptureError, match="gcc said"):
        capture.capture(replace(host, object_bytes=b"not an object"), step)


def test_facts_agree_with_the_elf(selection: Selection, built: list[BuiltCell]) -> None:
    """ELF, PTX and launch state the same parameters; a changed image length is refused."""
    store = selection.workspace.store
    artifact, launch = built[0].artifacts[0], built[0].plan.launches[0]
    cubin, ptx = store.blob(artifact.cubin), store.blob(artifact.ptx).decode()
    assert inspect.inspect(cubin, ptx, launch) == built[0].facts[0]
    with pytest.raises(inspect.InspectError, match="parameter sizes differ"):
        inspect.inspect(cubin, ptx, replace(launch, images=(*launch.images[:-1], launch.images[-1] + b"\0")))


def test_cut_cubin_is_refused() -> None:
    """Bytes that are no ELF raise a CubinError."""
    with pytest.raises(elf.CubinError, match="expected a cubin"):
        elf.kernels(b"\x7fELF")
