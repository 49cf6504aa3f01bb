"""A BF16 pair with float32 parameters: who is admitted, and that each call rounds what the parameters hold then."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import manifest
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import NotAdmitted
from kf_runtime.manifest import Manifest
from runtime_fakes import FakeDriver, operands, read_pointer, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]
Precision = kf_runtime.TriMulPrecision
BIASED = trimul_cell(biases=True)
PARAMETERS = tuple(name for name in operands(BIASED) if name not in ("x", "mask"))
update = kf_runtime.triangle_multiplicative_update


def showing(name: str, *parameters: str) -> Manifest:
    """A manifest whose last kernel copies 64 bytes of the operand ``name`` to the output."""
    found = small_manifest(BIASED, parameters=parameters or ("bf16", "f32"))
    ((digest, plan),) = found.plans.items()
    *before, last = plan.launches
    slots = tuple(replace(slot, buffer=name) if slot.buffer == "x" else slot for slot in last.slots)
    return replace(found, plans={digest: replace(plan, launches=(*before, replace(last, slots=slots)))})


def mixed(seed: int = 0) -> dict[str, torch.Tensor]:
    """A call of the cell with biases: BF16 pair and mask, float32 parameters that no BF16 holds exactly."""
    torch.manual_seed(seed)
    tensors = operands(BIASED, seed)
    return {n: v if n in ("x", "mask") else torch.randn(v.shape) for n, v in tensors.items()}


def code(call: dict[str, Any]) -> str:
    """What ``explain`` says: a reason's code, or "kernel"."""
    route = kf_runtime.explain("triangle_multiplicative_update", **call)
    return route.reason.code if isinstance(route, kf_runtime.Generic) else "kernel"


@pytest.fixture
def wheel(fake: FakeDriver, install: Install, tmp_path: Path) -> Dispatcher:
    return install(write_wheel(tmp_path / "data", showing("p_in_weight")))


def seen(call: dict[str, Any]) -> torch.Tensor:
    """The first elements of p_in_weight, as the kernel read them in this call."""
    return update(**call).flatten()[:16].clone()


@pytest.mark.parametrize("name", PARAMETERS)
@torch.no_grad()
def test_every_parameter_reaches_its_own_buffer(fake: FakeDriver, install: Install, tmp_path: Path, name: str) -> None:
    """Rounded to nearest even, at an address of the plan's alignment, whatever strides the float32 tensor has."""
    install(write_wheel(tmp_path / "data", showing(name)))
    addresses: list[int] = []
    copy = fake.on_launch

    def spy(function: str, parameters: int) -> None:
        if function == "finalize":
            addresses.append(read_pointer(parameters, 0))
        copy(function, parameters)

    fake.on_launch = spy
    call = mixed()
    turned = {**call, name: call[name].T.contiguous().T if call[name].dim() > 1 else call[name].repeat(2, 1).T[:, 0]}
    for one in (call, call, turned):
        out = update(**one)
        assert torch.equal(out.flatten()[:16], one[name].bfloat16().flatten()[:16])
    assert all(address % 256 == 0 for address in addresses) and kf_runtime.status().hits == 3


def test_what_is_written_behind_the_call_is_read(wheel: Dispatcher) -> None:
    """`.data`, `set_`, an optimizer's step and inference tensors: each call rounds the parameters as they are then."""
    call = mixed()
    weight = torch.nn.Parameter(call["p_in_weight"])
    call["p_in_weight"] = weight
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: weight.data.mul_(3),
            lambda: weight.set_(torch.randn(32, 16)),
            lambda: (setattr(weight, "grad", torch.randn(32, 16)), optimizer.step()),
            lambda: setattr(weight, "data", torch.randn(32, 16)),
        ):
            change()
            assert torch.equal(seen(call), weight.detach().bfloat16().flatten()[:16])
    with torch.inference_mode():
        frozen = {**call, "p_in_weight": torch.randn(32, 16)}
        for _ in range(2):
            frozen["p_in_weight"].add_(1)
            assert torch.equal(seen(frozen), frozen["p_in_weight"].bfloat16().flatten()[:16])
    assert kf_runtime.status().hits == 7 and kf_runtime.status().generic == {}


@torch.no_grad()
def test_one_copy_a_call_and_nothing_kept(wheel: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """One multi-tensor copy rounds all twelve parameters, into memory that no other call of the process holds."""
    plain, targets, call = torch._foreach_copy_, [], mixed()
    update(**call)

    def spy(narrow: list[torch.Tensor], wide: list[torch.Tensor]) -> None:
        targets.append((len(narrow), narrow[0].untyped_storage()))
        plain(narrow, wide)

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    for _ in range(3):
        update(**call)
    assert [count for count, _ in targets] == [12] * 3
    assert len({storage.data_ptr() for _, storage in targets}) == 3


DECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no precision": ({}, "kernel"),
    "NONE": ({"precision": Precision.NONE}, "kernel"),
    "DEFAULT": ({"precision": Precision.DEFAULT}, "kernel"),
    "bfloat16": ({"precision": "bfloat16"}, "kernel"),
    "TF32": ({"precision": Precision.TF32}, "precision"),
    "TF32x3": ({"precision": Precision.TF32x3}, "precision"),
    "IEEE": ({"precision": Precision.IEEE}, "precision"),
    "misaligned pair": ({"x": torch.zeros(1024 + 1).bfloat16()[1:].view(1, 8, 8, 16)}, "alignment"),
    "turned pair": ({"x": torch.zeros(1, 8, 8, 16).bfloat16().transpose(1, 2)}, "strides"),
}


@pytest.mark.parametrize("name", list(DECISIONS))
@torch.no_grad()
def test_who_is_admitted(wheel: Dispatcher, name: str) -> None:
    """Rounding is for callers that did not ask for float32 products; the call and ``explain`` agree, again and again.

    The admitted call in between makes the signature known, so that the hot path decides too.
    """
    change, expected = DECISIONS[name]
    call = {**mixed(), **change}
    for _ in range(3):
        assert code(call) == expected
        before = kf_runtime.status().hits
        update(**call)
        assert kf_runtime.status().hits - before == (expected == "kernel")
        update(**{**mixed(), "precision": call.get("precision")})


@torch.no_grad()
def test_autocast_and_gradients(wheel: Dispatcher) -> None:
    """BF16 autocast is what real models run: admitted. Float16 autocast and a gradient are declined."""
    call = mixed()
    for dtype, expected in ((torch.bfloat16, "kernel"), (torch.float16, "autocast")):
        with torch.autocast("cpu", dtype=dtype):
            assert code(call) == expected
            update(**call)
    with torch.enable_grad():
        wanted = {**call, "g_out_bias": call["g_out_bias"].clone().requires_grad_()}
        assert code(wanted) == "grad"
        update(**wanted)
    assert (kf_runtime.status().hits, kf_runtime.status().generic) == (1, {"autocast": 1, "grad": 1})


@torch.no_grad()
def test_a_cell_that_is_not_admitted_for_them(fake: FakeDriver, install: Install, tmp_path: Path) -> None:
    """The reason names the cell; asking for the rounding runs it; force raises; shape queries and explain agree."""
    folder = write_wheel(tmp_path / "data", showing("p_in_weight", "bf16"))
    install(folder)
    query = kf_runtime.triangle_multiplicative_update_inference_shape_is_supported
    shape = {"shape": (1, 8, 8, 16), "hidden_dim": 16, "has_bias": True}
    call = mixed()
    assert code(call) == "parameter_dtype" and not query(**shape, param_dtype=torch.float32) and query(**shape)
    explained = str(kf_runtime.explain_gates(**call))
    assert "accuracy      decides" in explained and "expected bf16; found f32" in explained and BIASED.key in explained
    for _ in range(2):
        update(**call)
    assert kf_runtime.status().generic == {"parameter_dtype": 2}
    assert torch.equal(seen({**call, "precision": "bfloat16"}), call["p_in_weight"].bfloat16().flatten()[:16])
    install(folder, Mode.FORCE)
    with pytest.raises(NotAdmitted, match="parameter_dtype"):
        update(**call)
    update(**call, precision=Precision.IEEE)  # asked for float32 products: never KF's, so that force keeps it generic
    install(write_wheel(tmp_path / "both", showing("p_in_weight")), Mode.FORCE)
    assert query(**shape, param_dtype=torch.float32)
    assert not query(**shape, param_dtype=torch.float16) and not query(**shape, dtype=torch.float32)
    update(**call)
    assert kf_runtime.status().hits == 1


def test_manifests_that_say_nothing_admit_bf16_alone() -> None:
    """A manifest of an older factory has no ``parameter_dtypes``; the others keep them."""
    tree = json.loads(manifest.to_bytes(small_manifest(parameters=("bf16", "f32"))))
    assert manifest.from_bytes(json.dumps(tree).encode()).entries[trimul_cell()].parameter_dtypes == ("bf16", "f32")
    for entry in tree["entries"].values():
        del entry["parameter_dtypes"]
    assert manifest.from_bytes(json.dumps(tree).encode()).entries[trimul_cell()].parameter_dtypes == ("bf16",)


@torch.no_grad()
def test_threads_round_their_own_parameters(wheel: Dispatcher) -> None:
    """Eight threads at once, each with parameters of its own, each sees those."""
    wrong: list[int] = []

    def work(seed: int, call: dict[str, Any]) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(seen(call), call["p_in_weight"].bfloat16().flatten()[:16]):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed, mixed(seed))) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and kf_runtime.status().hits == 400


@torch.no_grad()
def test_split_parameters_and_compiled_calls(wheel: Dispatcher) -> None:
    """The split op joins float32 halves and is admitted alike; a compiled call gets the operator, which rounds."""
    call = mixed()
    torch._dynamo.reset()
    compiled = torch.compile(lambda **k: update(**k), fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(**call).flatten()[:16], call["p_in_weight"].bfloat16().flatten()[:16])
        call["p_in_weight"].data.add_(1)
    compiled(**call, precision=Precision.IEEE)
    assert kf_runtime.status().graphs == {"kf": 1, "precision": 1} and kf_runtime.status().hits == 2
    halves = {n: call[n] for n in call if not n.startswith(("p_in", "g_in"))}
    for part in "pg":
        for kind in ("weight", "bias"):
            halves[f"a_{part}_{kind}"], halves[f"b_{part}_{kind}"] = call[f"{part}_in_{kind}"].chunk(2)
    out = kf_runtime.triangle_multiplicative_update_split_parameters(**halves)
    assert torch.equal(out.flatten()[:16], call["p_in_weight"].bfloat16().flatten()[:16])
