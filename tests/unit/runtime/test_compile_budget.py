"""torch.compile: which shapes get a graph with kernels, in every order, within Dynamo's recompile limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]
ADMITTED = (8, 10, 12, 14, 16)
DECLINED = (9, 11, 13)
LIMIT = 5


class Counting:
    """A compile backend that counts graphs and runs them as they are; ``graphs`` says what each holds."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.graphs.append("kf" if any("triangle_multiplicative_update" in name for name in names) else "generic")
        return graph


@pytest.fixture(autouse=True)
def wheel(fake: FakeDriver, install: Install, tmp_path: Path) -> Iterator[None]:
    """Five admitted N, both directions, on the fake driver; Dynamo starts afresh."""
    cells = [trimul_cell(N=n, direction=d) for n in ADMITTED for d in ("outgoing", "incoming")]
    install(write_wheel(tmp_path / "data", small_manifest(*cells)))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    torch._dynamo.reset()


def parameters() -> dict[str, torch.nn.Parameter]:
    """The small cell's parameters, as a model holds them: their sizes stay numbers under dynamic=True."""
    return {n: torch.nn.Parameter(v) for n, v in operands(trimul_cell()).items() if n not in ("x", "mask")}


class Runner:
    """A compiled calling function, the graphs compiled for it, and whether each call ran kernels."""

    def __init__(self, fake: FakeDriver, directions: tuple[str, ...] = ("outgoing",), **options: Any) -> None:
        self.fake, self.backend = fake, Counting()
        weights = parameters()

        def block(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for direction in directions:
                x = x + kf_runtime.triangle_multiplicative_update(x, direction, mask, **weights)
            return x

        block.__code__ = block.__code__.replace(co_name=f"block_{id(self)}")  # Dynamo's limit counts by code object
        self.launches_a_call = 3 * len(directions)
        self.function = torch.compile(block, backend=self.backend, fullgraph=True, **options)

    def __call__(self, N: int) -> tuple[bool, int]:
        """(kernels ran, graphs compiled) of one call at this N."""
        graphs, launches = len(self.backend.graphs), len(self.fake.launches)
        with torch.no_grad():
            self.function(torch.randn(1, N, N, 16).bfloat16(), torch.ones(1, N, N).bfloat16())
        ran = len(self.fake.launches) - launches
        assert ran in (0, self.launches_a_call)
        return ran > 0, len(self.backend.graphs) - graphs


@pytest.mark.parametrize(
    ("first", "directions", "dynamic"),
    [
        ("admitted", ("outgoing",), None),
        ("declined", ("outgoing", "incoming"), None),
        ("alternating", ("outgoing",), None),
        ("alternating", ("outgoing",), True),
    ],
)
def test_the_budget_in_every_order(
    fake: FakeDriver, directions: tuple[str, ...], dynamic: bool | None, first: str
) -> None:
    """Exactly limit - 2 shapes run kernels, the rest share one graph, and no shape ever compiles twice."""
    run = Runner(fake, directions, dynamic=dynamic)
    orders = {
        "admitted": (*ADMITTED, *DECLINED),
        "declined": (*DECLINED[:3], *ADMITTED, *DECLINED[3:]),
        "alternating": tuple(n for pair in zip(ADMITTED, (*DECLINED, 15, 17), strict=True) for n in pair),
    }
    ran = {n: run(n)[0] for n in orders[first]}
    expected = [n for n in orders[first] if n in ADMITTED][: LIMIT - 2]
    assert [n for n, kernels in ran.items() if kernels] == expected
    assert run.backend.graphs.count("kf") == LIMIT - 2
    assert run.backend.graphs.count("generic") <= 2 and len(run.backend.graphs) <= LIMIT
    for n in reversed(orders[first]):
        assert run(n) == (n in expected, 0)


def test_a_kf_shape_is_revisited_after_the_shared_graph(fake: FakeDriver) -> None:
    """The shared graph, hit last and so looked at first, does not take a shape that has its own graph."""
    run = Runner(fake)
    assert run(8) == (True, 1)
    assert run(9) == (False, 1)
    for _ in range(3):
        assert run(11) == (False, 0)
        assert run(8) == (True, 0)
    assert run(10) == (True, 1)
    assert run(9) == (False, 0)


def test_static_shapes_with_a_raised_limit_all_get_kernels(fake: FakeDriver) -> None:
    """dynamic=False: a graph for each shape, each with kernels where admitted; nothing is budgeted away."""
    with torch._dynamo.config.patch(recompile_limit=len(ADMITTED) + 1):
        run = Runner(fake, dynamic=False)
        assert [run(n) for n in ADMITTED] == [(True, 1)] * len(ADMITTED)
        assert run(9) == (False, 1)
        assert [run(n) for n in ADMITTED] == [(True, 0)] * len(ADMITTED)


def test_the_closing_is_logged_once(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """One warning says how many shapes have graphs and how to get more; each KF graph is named at INFO."""
    caplog.set_level(logging.INFO, "kf_runtime")
    run = Runner(fake)
    for n in ADMITTED:
        run(n)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "recompile_limit" in warnings[0].getMessage()
    assert sum("gets a graph" in r.getMessage() for r in caplog.records) == LIMIT - 2
    assert kf_runtime.status().graphs["kf"] == LIMIT - 2


def test_a_second_function_keeps_to_the_shapes_of_the_first(fake: FakeDriver) -> None:
    """The budget is the process's: another function gets kernels at granted shapes, its own graph for the rest."""
    one, two = Runner(fake), Runner(fake, ("incoming",))
    for n in ADMITTED:
        one(n)
    assert [two(n)[0] for n in ADMITTED] == [n in ADMITTED[: LIMIT - 2] for n in ADMITTED]
    assert len(two.backend.graphs) <= LIMIT


def test_grad_and_training_use_the_formula(fake: FakeDriver) -> None:
    """With a gradient to compute, every shape is plain aten, and the gradients are plain torch's."""
    run = Runner(fake, dynamic=True)
    x = torch.randn(1, 8, 8, 16).bfloat16().requires_grad_()
    run.function(x, torch.ones(1, 8, 8).bfloat16()).float().sum().backward()
    assert run.backend.graphs == ["generic"] and fake.launches == [] and x.grad is not None


def test_a_batch_that_varies_is_right(fake: FakeDriver, install: Install, tmp_path: Path) -> None:
    """B may vary as well: (B, N) pairs that are cells get graphs, the rest share one."""
    install(write_wheel(tmp_path / "b", small_manifest(trimul_cell(B=2), trimul_cell(B=4), trimul_cell(B=4, N=10))))
    weights = parameters()
    backend = Counting()
    function = torch.compile(
        lambda x, mask: kf_runtime.triangle_multiplicative_update(x, "outgoing", mask, **weights), backend=backend
    )
    for B, N, kernels in ((2, 8, 3), (3, 8, 0), (4, 8, 3), (5, 9, 0), (4, 10, 3), (7, 11, 0), (2, 8, 3), (4, 8, 3)):
        before = len(fake.launches)
        with torch.no_grad():
            function(torch.randn(B, N, N, 16).bfloat16(), torch.ones(B, N, N).bfloat16())
        assert len(fake.launches) - before == kernels, (B, N)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUTO])
def test_where_nothing_is_admitted_nothing_is_specialised(
    fake: FakeDriver, install: Install, tmp_path: Path, mode: Mode
) -> None:
    """Off, or on a product without cells, two graphs serve every shape."""
    fake.product = "NVIDIA H200"
    install(write_wheel(tmp_path / "n", small_manifest(trimul_cell())), mode)
    run = Runner(fake)
    assert [run(n) for n in (8, 9, 10, 11, 12)] == [(False, 1), (False, 1), (False, 0), (False, 0), (False, 0)]


def test_a_marked_dimension_stays_dynamic(fake: FakeDriver) -> None:
    """mark_dynamic on the pair is honoured: no constraint violation; the formula serves the call."""
    run = Runner(fake)
    x, mask = torch.randn(1, 8, 8, 16).bfloat16(), torch.ones(1, 8, 8).bfloat16()
    for tensor in (x, mask):
        torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(tensor, 2)
    with torch.no_grad():
        run.function(x, mask)
    assert run.backend.graphs == ["generic"]
