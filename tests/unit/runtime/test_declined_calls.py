"""Declined calls that came before: remembered by metadata alone, exactly, and within bounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import dispatch
from kf_runtime.dispatch import Dispatcher
from kf_runtime.ops import trimul_hot
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]
update = kf_runtime.triangle_multiplicative_update


def placed(value: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same values, row-major, ``offset`` bytes past a multiple of 256: tensors differ in nothing by chance."""
    room = torch.empty(value.numel() + 256, dtype=value.dtype)
    start = (-room.data_ptr() % 256 + offset) // value.element_size()
    return room[start : start + value.numel()].view(value.shape).copy_(value)


def turned(value: torch.Tensor) -> torch.Tensor:
    """The same values in another layout."""
    return placed(value.transpose(-1, -2).contiguous()).transpose(-1, -2)


BASE = {name: placed(value) for name, value in operands(trimul_cell()).items()}
DECLINED: dict[str, dict[str, Any]] = {
    "eps": {"eps": 1e-3},
    "strides": {"x": turned(BASE["x"])},
    "alignment": {"p_in_weight": placed(BASE["p_in_weight"], 2)},
    "weights": {"norm_out_bias": None},
    "biases": {"p_out_bias": placed(torch.zeros(16).bfloat16())},
}
#: One change each to any of those calls, after which the reason may be another one, or none.
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dense x": {"x": placed(BASE["x"])},
    "aligned weight": {"p_in_weight": placed(BASE["p_in_weight"])},
    "misaligned elsewhere": {"g_in_weight": placed(BASE["g_in_weight"], 4)},
    "turned elsewhere": {"g_out_weight": turned(BASE["g_out_weight"])},
    "eps": {"eps": 1e-5},
    "a missing weight": {"norm_in_weight": None},
    "no p_in_weight": {"p_in_weight": None},
    "a bias": {"g_in_bias": placed(torch.zeros(32).bfloat16())},
    "a Boolean mask": {"mask": placed(BASE["mask"] > 0)},
    "precision": {"precision": kf_runtime.TriMulPrecision.IEEE},
}


@pytest.fixture
def wheel(fake: FakeDriver, install: Install, tmp_path: Path) -> Dispatcher:
    return install(write_wheel(tmp_path / "data", small_manifest()))


def reason(call: dict[str, Any]) -> str:
    """What ``explain`` says, which remembers nothing: a reason's code, or "kernel"."""
    route = kf_runtime.explain("triangle_multiplicative_update", **call)
    return route.reason.code if isinstance(route, kf_runtime.Generic) else "kernel"


def counted(call: dict[str, Any]) -> str:
    """What a call was counted as."""
    before = kf_runtime.status().generic
    update(**call)
    after = kf_runtime.status().generic
    return next((code for code, count in after.items() if count != before.get(code, 0)), "kernel")


@pytest.mark.parametrize("admitted_first", [True, False])
@pytest.mark.parametrize("code", list(DECLINED))
@torch.no_grad()
def test_a_remembered_reason_is_the_one_that_explain_finds(wheel: Dispatcher, code: str, admitted_first: bool) -> None:
    """Whatever was declined or admitted before, a call that differs in one thing is decided on its own metadata."""
    if admitted_first:
        assert counted(BASE) == "kernel"
    declined = {**BASE, **DECLINED[code]}
    wide = {n: v.float() for n, v in declined.items() if isinstance(v, torch.Tensor) and n not in ("x", "mask")}
    for change in (*CHANGES.values(), wide):
        assert [counted(declined) for _ in range(2)] == [code, code]
        call = {**declined, **change}
        assert [counted(call) for _ in range(2)] == [reason(call)] * 2


@pytest.mark.parametrize("code", list(DECLINED))
@torch.no_grad()
def test_gradients_subclasses_and_errors_are_seen_after_a_decline(wheel: Dispatcher, code: str) -> None:
    """A remembered decline hides neither a gradient, nor a subclass, nor an argument that the op refuses."""

    class Mine(torch.Tensor):
        pass

    call = {**BASE, **DECLINED[code]}
    for _ in range(2):
        assert counted(call) == code
    with torch.enable_grad():
        assert counted({**call, "g_out_weight": call["g_out_weight"].clone().requires_grad_()}) == "grad"
    assert counted({**call, "g_out_weight": call["g_out_weight"].as_subclass(Mine)}) == "tracing"
    wrong = {
        "precision": 3,
        "direction": "sideways",
        "norm_in_bias": placed(torch.zeros(15).bfloat16()),
        "norm_in_weight": placed(torch.zeros(16).half()),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            update(**{**call, name: value})


@torch.no_grad()
def test_what_is_remembered_is_bounded(wheel: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers whose eps, shapes or strides never repeat do not grow the table without end."""
    monkeypatch.setattr(dispatch, "TABLE_LIMIT", 8)
    for i in range(40):
        update(**{**BASE, "eps": 1e-3 + i})
    assert len(dispatch.current().table) <= 8
    wide = torch.zeros(200 * 32 * 16).bfloat16()
    for i in range(1, trimul_hot.DECLINED_LIMIT + 9):
        update(**{**BASE, "p_in_weight": wide.as_strided((32, 16), (16 * i, i))})
    assert max(len(known.declined) for known in dispatch.current().table.values()) <= trimul_hot.DECLINED_LIMIT


@pytest.mark.parametrize("code", ["strides", "alignment", "weights", "biases"])
@torch.no_grad()
def test_a_remembered_decline_is_not_decided_again(
    wheel: Dispatcher, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of the same metadata, on other tensors, reaches neither the argument check nor the route."""
    call = {**BASE, **DECLINED[code]}
    update(**call)
    home = importlib.import_module("kf_runtime.ops.triangle_multiplicative_update")
    monkeypatch.setattr(home, "check", lambda _: pytest.fail("checked again"))
    monkeypatch.setattr(Dispatcher, "decide", lambda *_: pytest.fail("decided again"))
    update(**call)
    assert kf_runtime.status().generic == {code: 2}
