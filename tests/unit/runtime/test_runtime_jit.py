"""JIT forms as dispatch sees them: who answers, why not, and what is never looked at. No compiler is needed."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import dispatch, inspection
from kf_runtime.campaign import Mode, Settings
from kf_runtime.cell import Cell
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import JitFailed, JitToolchain, NoKernel, NotAdmitted
from kf_runtime.jit import GROUP
from kf_runtime.plan import Buffer
from kf_runtime.route import Generic, UseCubin, UseJit
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, trimul_plan, write_wheel

OP = kf_runtime.triangle_multiplicative_update


class FakeExecutor:
    """Writes 7 and remembers its operands."""

    takes_tensors = True
    launches = 3
    alignment = 16

    def __init__(self, inputs: tuple[str, ...], family: str) -> None:
        self.inputs, self.family = inputs, family
        self.seen: list[dict[str, torch.Tensor]] = []

    @property
    def calls(self) -> int:
        return len(self.seen)

    def run(self, given: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        self.seen.append(dict(zip(self.inputs, given, strict=True)))
        return torch.full_like(like, 7)


class FakeForm:
    """A form of one cell. Its executor wants its inputs in another order than the call's."""

    def __init__(self, name: str = "wild", problem: str | None = None, broken: bool = False) -> None:
        self.name, self.problem, self.broken = name, problem, broken
        self.cells = frozenset((trimul_cell(),))
        self.built: list[FakeExecutor] = []

    def buffers(self, cell: Cell) -> tuple[Buffer, ...]:
        return trimul_plan(cell).buffers

    def build(self, cell: Cell, device: torch.device) -> FakeExecutor:
        if self.broken:
            raise JitFailed(self.name, cell, "the compiler said no")
        inputs = tuple(b.name for b in reversed(self.buffers(cell)) if b.role == "input")
        self.built.append(FakeExecutor(inputs, self.name))
        return self.built[-1]


Start = Callable[..., Dispatcher]


@pytest.fixture
def start(fake: FakeDriver, tmp_path: Path) -> Iterator[Start]:
    """Starts a process's dispatcher anew, with a wheel of the small cell: ``start(jit, mode)``."""
    folder = write_wheel(tmp_path / "data", small_manifest())
    before = dispatch.current()

    def put(jit: str = "", mode: Mode = Mode.AUTO) -> Dispatcher:
        dispatcher = Dispatcher(Settings(mode=mode, jit=jit), folder)
        dispatch.install(dispatcher)
        return dispatcher

    yield put
    dispatch.install(before)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entry points that offer ``wild`` and one that does not load; the groups that were asked for."""
    groups: list[str] = []

    def broken() -> Any:
        raise ImportError("no module named 'gone'")

    def entry_points(*, group: str) -> list[Any]:
        groups.append(group)
        good = SimpleNamespace(name="good", load=lambda: lambda: [FakeForm()])
        return [good, SimpleNamespace(name="bad", load=broken)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return groups


def call(cell: Cell | None = None, **changes: Any) -> torch.Tensor:
    """The small cell's call, without grad mode."""
    with torch.no_grad():
        return OP(direction="outgoing", **{**operands(cell or trimul_cell()), **changes})


def explain(**changes: Any) -> Any:
    """Its route."""
    with torch.no_grad():
        return kf_runtime.explain(OP.__name__, direction="outgoing", **{**operands(trimul_cell()), **changes})


@pytest.mark.parametrize(("jit", "mode"), [("", Mode.AUTO), (" , ", Mode.AUTO), ("wild", Mode.OFF)])
def test_entry_points_are_not_read(start: Start, read: list[str], jit: str, mode: Mode) -> None:
    """Without KF_JIT, and with KF off, no call, explain or status reads an entry point."""
    start(jit, mode)
    call()
    explain()
    assert kf_runtime.status().jit == {}
    assert read == []


def test_asked_family_answers_before_the_cubin(start: Start, read: list[str]) -> None:
    """KF_JIT is read once; the family then answers, and status counts its hits and launches."""
    start("wild")
    assert read == []
    assert isinstance(explain(), UseJit) and "wild" in str(explain())
    assert bool((call() == 7).all()) and bool((call() == 7).all())
    status = kf_runtime.status()
    assert (status.jit, status.hits, status.launches, status.generic) == ({"wild": 2}, 2, 6, {})
    assert read == [GROUP]


def test_unknown_family_is_generic_with_one_warning(start: Start, read: list[str], fake: FakeDriver) -> None:
    """One warning names what was asked, what there is, and the provider that does not load; nothing is launched."""
    start("tame")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(), call()
    assert [str(w.message).count("tame") for w in caught] == [1]
    assert "wild" in str(caught[0].message) and "gone" in str(caught[0].message)
    assert isinstance(explain(), Generic) and explain().reason.code == "jit_family"
    assert fake.launches == []
    assert kf_runtime.status().generic == {"jit_family": 2}


def test_a_provider_that_raises_is_a_reason(start: Start, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """A development checkout with a broken family in it declines the call and says what broke, as a warning."""

    def provide() -> list[FakeForm]:
        raise ValueError("cells.toml: cells[0]: unknown field 'NN'")

    point = SimpleNamespace(name="kernel_factory", load=lambda: provide)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    start("wild")
    with pytest.warns(RuntimeWarning, match="unknown field 'NN'"):
        call()
    assert explain().reason.code == "jit_family" and fake.launches == []


def test_a_known_family_beside_an_unknown_one_answers(start: Start, read: list[str]) -> None:
    """KF_JIT=wild,tame: wild's cell runs; another cell says that tame is unknown."""
    start("wild,tame")
    assert bool((call() == 7).all())
    other = operands(trimul_cell(N=16))
    with torch.no_grad():
        assert kf_runtime.explain(OP.__name__, direction="outgoing", **other).reason.code == "jit_family"


def test_registered_form_takes_over_a_resolved_cell(start: Start, fake: FakeDriver) -> None:
    """A cell that ran its cubin runs the JIT form from the moment of registration; other cells keep deciding."""
    dispatcher, form = start(), FakeForm()
    assert isinstance(explain(), UseCubin)
    call(), call()
    launched = len(fake.launches)
    assert launched == 6
    dispatcher.register(form)
    given = operands(trimul_cell())
    for _ in range(2):
        assert bool((call(**given) == 7).all())
    assert len(fake.launches) == launched and len(form.built) == 1
    for seen in form.built[0].seen:
        assert all(seen[name] is given[name] for name in seen) and seen.keys() == given.keys()
    with torch.no_grad():
        other = kf_runtime.explain(OP.__name__, direction="outgoing", **operands(trimul_cell(N=16)))
    assert other.reason.code == "cell"


@pytest.mark.parametrize("name", ["wrong version", "failed build"])
def test_a_form_that_cannot_run_is_generic_with_the_reason(start: Start, fake: FakeDriver, name: str) -> None:
    """Versions or a failed compile: the generic path, not the cubin, one warning; under force the error itself."""
    problem = "apache-tvm-ffi: needs 2; found 1"
    form = FakeForm(problem=problem) if name == "wrong version" else FakeForm(broken=True)
    text, error = (problem, JitToolchain) if name == "wrong version" else ("the compiler said no", JitFailed)
    start().register(form)
    with pytest.warns(RuntimeWarning, match=text) as caught:
        call(), call()
    assert len(caught) == 1 and fake.launches == []
    assert kf_runtime.status().generic == {error.code: 2}
    if name == "wrong version":
        assert problem in str(explain())
    start(mode=Mode.FORCE).register(form)
    with pytest.raises(error, match=text):
        call()


def test_operands_are_compared_as_for_a_cubin(start: Start) -> None:
    """Grad, strides and alignment: the generic path with the cubin path's own reasons, nothing built."""
    form = FakeForm()
    start().register(form)
    given = operands(trimul_cell())
    wide = torch.zeros(given["x"].numel() + 1, dtype=torch.bfloat16)
    skewed = wide[1:].view(given["x"].shape)
    assert explain(x=given["x"].transpose(1, 2)).reason.code == "strides"
    assert explain(x=skewed).reason.code == "alignment"
    assert explain(eps=1e-3).reason.code == "eps"
    x = given.pop("x").requires_grad_()
    assert kf_runtime.explain(OP.__name__, x, direction="outgoing", **given).reason.code == "grad"
    OP(x, direction="outgoing", **given).sum().backward()
    assert x.grad is not None and form.built == []
    start(mode=Mode.FORCE).register(form)
    with pytest.raises(NotAdmitted, match="strides"):
        call(x=x.detach().transpose(1, 2))


def test_first_call_while_capturing_is_generic(start: Start, fake: FakeDriver) -> None:
    """A form is not built while a stream captures; one that ran before is captured like any other."""
    form = FakeForm()
    start().register(form)
    fake.capturing = True
    call()
    assert form.built == [] and kf_runtime.status().generic == {"capturing": 1}
    fake.capturing = False
    call()
    fake.capturing = True
    assert bool((call() == 7).all())


def test_a_forked_child_keeps_the_forms(start: Start) -> None:
    """What was registered or asked for before a fork still holds in the child, with a lock of its own."""
    parent = start()
    parent.register(FakeForm())
    dispatch._fresh()
    child = dispatch.current()
    assert child is not parent and child.forms is not parent.forms
    assert child.jit_families() == ("wild",)


def test_other_questions_know_the_form(start: Start) -> None:
    """A shape that only a form answers for is supported, doctor lists the family, and preload says what it cannot."""
    dispatcher, form = start(), FakeForm()
    other = trimul_cell(N=16)
    form.cells = frozenset((other,))
    supported = kf_runtime.triangle_multiplicative_update_inference_shape_is_supported
    shape = ((1, 16, 16, 16), 16)
    assert not supported(*shape)
    dispatcher.register(form)
    assert supported(*shape) and not supported((1, 24, 24, 16), 16)
    assert any("wild" in line for line in inspection.doctor().lines)
    with pytest.raises(NoKernel, match="JIT path"):
        kf_runtime.preload(other)
    assert kf_runtime.preload() == (trimul_cell(),) and form.built == []


def test_a_form_gets_rounded_parameters_where_rounding_was_asked_for(start: Start) -> None:
    """precision="bfloat16": BF16 tensors of the float32 parameters, the first time and later; else cubins decide."""
    form = FakeForm()
    start().register(form)
    wide = {n: v.float() * 1.001 for n, v in operands(trimul_cell()).items() if n not in ("x", "mask")}
    for _ in range(2):
        call(**wide, precision="bfloat16")
    (executor,) = form.built
    assert executor.calls == 2
    for seen in executor.seen:
        assert all(torch.equal(seen[name], value.bfloat16()) for name, value in wide.items())
    assert explain(**wide).reason.code == "parameter_dtype"
