"""The long explanation, the logger, the split-parameter op, and parameters that change under the caller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "data", small_manifest())


GATES: dict[str, dict[str, Any]] = {
    "dtype": {"x": torch.zeros(1, 8, 8, 16), "norm_in_weight": None},
    "shape": {"x": torch.zeros(1, 9, 9, 16).bfloat16(), "mask": None},
    "parameters": {"eps": 1e-3},
    "strides": {"x": torch.zeros(1, 8, 8, 16).bfloat16().transpose(1, 2)},
    "alignment": {"p_in_weight": torch.zeros(513).bfloat16()[1:].view(32, 16)},
}


@pytest.mark.parametrize("gate", list(GATES))
@torch.no_grad()
def test_the_deciding_gate_is_named(fake: FakeDriver, install: Install, wheel: Path, gate: str) -> None:
    """Gates before the deciding one are passed, it says why, the nearest cell is there, and nothing is launched."""
    install(wheel)
    tensors = {**operands(trimul_cell()), **GATES[gate]}
    if gate == "dtype":
        tensors = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in tensors.items()}
    found = kf_runtime.explain_gates(**tensors)
    lines = str(found).splitlines()
    assert found.gate == gate and fake.launches == []
    decided = next(i for i, line in enumerate(lines) if "decides" in line)
    assert lines[decided].split()[0] == gate and all("passed" in line for line in lines[:decided])
    assert gate in ("dtype",) or ".N8." in lines[decided]
    assert lines[-2].split()[0] == "budget" and lines[-1].split()[0] == "memory"


@torch.no_grad()
def test_gates_of_an_admitted_call_and_of_modes(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """An admitted call passes every gate; off, grad and an unproved product decide at theirs."""
    install(wheel)
    tensors = operands(trimul_cell())
    assert "decides" not in str(kf_runtime.explain_gates(**tensors)) and "cubin path" in str(
        kf_runtime.explain_gates(**tensors)
    )
    with torch.enable_grad():
        asked = {**tensors, "p_in_weight": tensors["p_in_weight"].clone().requires_grad_()}
        assert kf_runtime.explain_gates(**asked).gate == "grad"
    install(wheel, Mode.OFF)
    assert kf_runtime.explain_gates(**tensors).gate == "mode"
    fake.product = "NVIDIA H200"
    install(wheel)
    assert kf_runtime.explain_gates(**tensors).gate == "device"


@torch.no_grad()
def test_each_route_is_logged_once(
    fake: FakeDriver, install: Install, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The logger names a new kernel route and each new reason once, at INFO."""
    caplog.set_level(logging.INFO, "kf_runtime")
    install(wheel)
    tensors = operands(trimul_cell())
    for _ in range(3):
        kf_runtime.triangle_multiplicative_update(**tensors)
        kf_runtime.triangle_multiplicative_update(**{**tensors, "eps": 1e-3})
    messages = [record.getMessage() for record in caplog.records if record.name == "kf_runtime"]
    assert len(messages) == 2 and "cubin path" in messages[0] and "generic path (eps)" in messages[1]


def split(tensors: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the split op for those of the packed one."""
    named = dict(tensors)
    for part in "pg":
        for kind in ("weight", "bias"):
            value = named.pop(f"{part}_in_{kind}", None)
            halves = (None, None) if value is None else value.chunk(2)
            named[f"a_{part}_{kind}"], named[f"b_{part}_{kind}"] = halves
    return named


@pytest.mark.parametrize("biases", [False, True])
def test_split_parameters_equal_packed(fake: FakeDriver, install: Install, wheel: Path, biases: bool) -> None:
    """The split op is the packed op, gradients reach both halves, and inference runs the kernel."""
    install(wheel)
    update, apart = (
        kf_runtime.triangle_multiplicative_update,
        kf_runtime.triangle_multiplicative_update_split_parameters,
    )
    packed = {n: v.float() for n, v in operands(trimul_cell(biases=biases)).items()}
    named = split(packed)
    leaves = {n: v.clone().requires_grad_() for n, v in named.items() if n[:2] in ("a_", "b_") and v is not None}
    out = apart(**{**named, **leaves})
    torch.testing.assert_close(out, update(**packed))
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.norm() > 0 for leaf in leaves.values())
    if not biases:
        with torch.no_grad():
            apart(**split(operands(trimul_cell())))
        assert kf_runtime.status().hits == 1


def test_halves_are_joined_outside_of_autocast(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Autocast of float16, which refuses to concatenate BF16, changes neither the halves nor the result."""
    install(wheel)
    packed = operands(trimul_cell())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        out = kf_runtime.triangle_multiplicative_update_split_parameters(**split(packed))
        torch.testing.assert_close(out, kf_runtime.triangle_multiplicative_update(**packed))
    assert fake.launches == []


def test_split_parameters_that_do_not_match(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """Halves of other shapes, or half a bias, are errors that name the argument."""
    named = split(operands(trimul_cell()))
    op = kf_runtime.triangle_multiplicative_update_split_parameters
    with pytest.raises(ValueError, match=r"b_g_weight: expected shape \[16, 16\]"):
        op(**{**named, "b_g_weight": torch.zeros(8, 16).bfloat16()})
    with pytest.raises(ValueError, match="b_p_bias: expected a tensor, as a_p_bias"):
        op(**{**named, "a_p_bias": torch.zeros(16).bfloat16()})


def test_parameters_that_change_under_the_caller(fake: FakeDriver, install: Install, wheel: Path) -> None:
    """`.data`, `set_` and inference tensors: each call reads what the tensors hold then; float32 is rounded anew."""
    install(wheel)
    update = kf_runtime.triangle_multiplicative_update
    tensors = {name: value.float() for name, value in operands(trimul_cell()).items()}
    seen = []
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            tensors["x"].data.fill_(value)
            seen.append(float(update(**tensors, precision="bfloat16").flatten()[0]))
        tensors["x"].set_(torch.full((1, 8, 8, 16), 4.0))
        seen.append(float(update(**tensors, precision="bfloat16").flatten()[0]))
    with torch.inference_mode():
        frozen = {**tensors, "x": torch.full((1, 8, 8, 16), 5.0)}
        seen.append(float(update(**frozen, precision="bfloat16").flatten()[0]))
        frozen["x"].fill_(6.0)
        seen.append(float(update(**frozen, precision="bfloat16").flatten()[0]))
    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and kf_runtime.status().hits == 6


@pytest.mark.parametrize("gate", list(GATES))
@torch.no_grad()
def test_explain_prints_the_gates(fake: FakeDriver, install: Install, wheel: Path, gate: str) -> None:
    """The first line is the reason; the second names the gates before the deciding one, and that one."""
    install(wheel)
    tensors = {**operands(trimul_cell()), **GATES[gate]}
    if gate == "dtype":
        tensors = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in tensors.items()}
    route = kf_runtime.explain("triangle_multiplicative_update", **tensors)
    reason, walked = str(route).splitlines()
    assert reason.startswith("generic path (") and walked.endswith(f"; decided by: {gate}")
    assert gate not in walked.split(";")[0] and walked.split(";")[0].startswith("  passed: mode")
    admitted = kf_runtime.explain("triangle_multiplicative_update", **operands(trimul_cell()))
    assert str(admitted).splitlines()[1].endswith("cubins, capture")
