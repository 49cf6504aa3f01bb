"""Tracers see plain aten: torch.compile, export, make_fx, FakeTensorMode, functorch and torch.jit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, write_wheel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

Install = Callable[..., Dispatcher]
update = kf_runtime.triangle_multiplicative_update


@pytest.fixture
def tensors(fake: FakeDriver, install: Install, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Operands of a call that KF would take, were it not traced; mode preview, so nothing else declines it."""
    install(write_wheel(tmp_path / "data", small_manifest()), Mode.PREVIEW)
    return operands(trimul_cell())


class Update(torch.nn.Module):
    """The op with its parameters, as export wants it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            if name not in ("x", "mask"):
                self.register_buffer(name, value)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return update(x, "outgoing", mask, **dict(self.named_buffers()))


def formula(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The generic path's answer, without any tracer."""
    from kf_runtime.ops import trimul_formula
    from kf_runtime.ops.triangle_multiplicative_update import arguments

    with torch.no_grad():
        return trimul_formula.formula(arguments(**tensors))


def operators(graph: torch.fx.GraphModule) -> set[str]:
    """Namespaces of the operators in a graph."""
    return {str(n.target).split(".")[0] for n in graph.graph.nodes if n.op == "call_function" and "." in str(n.target)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile_makes_one_graph_of_the_formula(
    tensors: dict[str, torch.Tensor], fake: FakeDriver, grad: bool, autocast: bool
) -> None:
    """fullgraph=True works with and without grad and autocast; with grad nothing is launched and it is the formula."""
    torch._dynamo.reset()
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    if grad:
        tensors["x"].requires_grad_()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = compiled(**tensors)
    assert len(fake.launches) == (0 if grad else 3)
    if grad:
        torch.testing.assert_close(out.detach(), formula(tensors), rtol=2e-2, atol=2e-2)
    else:  # the fake kernel copies the first 32 elements of x
        assert torch.equal(out.flatten()[:32], tensors["x"].flatten()[:32])


def test_compile_with_varying_shapes_and_options(tensors: dict[str, torch.Tensor]) -> None:
    """Dynamic N compiles once; None weights, precision and bias variants trace as well."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(update, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for N in (8, 9, 12):
            tensors["x"], tensors["mask"] = torch.randn(1, N, N, 16).bfloat16(), torch.ones(1, N, N).bfloat16()
            torch.testing.assert_close(compiled(**tensors), formula(tensors), rtol=2e-2, atol=2e-2)
        assert len(graphs) == 1
        compiled(tensors["x"].float(), precision="bfloat16")
        compiled(tensors["x"].float(), precision=kf_runtime.TriMulPrecision.IEEE)


@pytest.mark.parametrize("strict", [False, True])
def test_export_records_plain_aten(tensors: dict[str, torch.Tensor], fake: FakeDriver, strict: bool) -> None:
    """torch.export, with a dynamic N, holds aten operators only and launches nothing."""
    N = torch.export.Dim("N", min=2, max=64)
    shapes = {"x": {1: N, 2: N}, "mask": {1: N, 2: N}}
    with torch.no_grad():
        program = torch.export.export(
            Update(tensors), (tensors["x"], tensors["mask"]), dynamic_shapes=shapes, strict=strict
        )
        assert operators(program.graph_module) <= {"aten", "_operator", "<built-in function mul>"}
        x, mask = torch.randn(1, 11, 11, 16).bfloat16(), torch.ones(1, 11, 11).bfloat16()
        torch.testing.assert_close(
            program.module()(x, mask), formula({**tensors, "x": x, "mask": mask}), rtol=2e-2, atol=2e-2
        )
    assert fake.launches == []


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_plain_aten(tensors: dict[str, torch.Tensor], fake: FakeDriver, mode: str) -> None:
    """make_fx in every tracing mode records aten and launches nothing."""
    with torch.no_grad():
        graph = make_fx(
            lambda x, m: update(**{**tensors, "x": x, "mask": m}), tracing_mode=mode, _allow_non_fake_inputs=True
        )(tensors["x"], tensors["mask"])
        assert "aten" in operators(graph)
        torch.testing.assert_close(graph(tensors["x"], tensors["mask"]), formula(tensors), rtol=2e-2, atol=2e-2)
    assert fake.launches == []


def test_fake_tensors_functorch_and_jit_take_the_formula(tensors: dict[str, torch.Tensor], fake: FakeDriver) -> None:
    """FakeTensorMode, vmap, functional grad and torch.jit.trace never reach a kernel."""

    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return update(**{**tensors, "x": x, "mask": mask})

    x, mask = tensors["x"], tensors["mask"]
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert call(mode.from_tensor(x), mode.from_tensor(mask)).shape == x.shape
        stacked = torch.func.vmap(call)(torch.stack([x, x]), torch.stack([mask, mask]))
        torch.testing.assert_close(stacked[1], formula(tensors), rtol=2e-2, atol=2e-2)
        traced = torch.jit.trace(call, (x, mask), check_trace=False)
        torch.testing.assert_close(traced(x, mask), formula(tensors), rtol=2e-2, atol=2e-2)
        assert update(x.to("meta"), **{n: v.to("meta") for n, v in tensors.items() if n != "x"}).is_meta
    gradient = torch.func.grad(lambda v: call(v, mask).float().sum())(x)
    assert gradient.shape == x.shape
    assert fake.launches == []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["x", "p_out_weight"])
def test_tangents_of_forward_mode_take_the_formula(
    tensors: dict[str, torch.Tensor], fake: FakeDriver, name: str, grad: bool, compiled: bool
) -> None:
    """A dual tensor has a tangent whatever requires_grad and no_grad say; it comes out as the formula's own."""
    torch._dynamo.reset()
    call = torch.compile(update, backend="eager") if compiled else update
    tangent = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        call(**tensors)  # the signature, and the graph, are ready to launch
        launched = len(fake.launches)
    assert launched == 3
    exact = {key: value.double() for key, value in tensors.items()}
    _, expected = torch.func.jvp(lambda v: formula({**exact, name: v}), (exact[name],), (tangent.double(),))
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[name], tangent)
        found = torch.autograd.forward_ad.unpack_dual(call(**{**tensors, name: dual})).tangent
    assert found is not None
    assert (found.double() - expected).norm() < 3e-2 * expected.norm()
    assert len(fake.launches) == launched


def test_subclasses_and_dispatch_modes_take_the_formula(tensors: dict[str, torch.Tensor], fake: FakeDriver) -> None:
    """A tensor subclass, or a dispatch mode such as a FLOP counter, sees every aten operation."""
    from torch.utils.flop_counter import FlopCounterMode

    class Subclass(torch.Tensor):
        pass

    with torch.no_grad():
        with FlopCounterMode(display=False) as flops:
            update(**tensors)
        assert flops.get_total_flops() > 0
        update(**{**tensors, "x": tensors["x"].as_subclass(Subclass)})
        assert fake.launches == []
        update(**tensors)
        assert len(fake.launches) == 3
    assert kf_runtime.status().generic == {"tracing": 2}


def test_a_traced_call_is_a_plain_tensor(tensors: dict[str, Any]) -> None:
    """Parameters (nn.Parameter) are plain tensors: they reach the kernel under no_grad."""
    with torch.no_grad():
        names = [n for n in tensors if n not in ("x", "mask")]
        update(**{**tensors, **{n: torch.nn.Parameter(tensors[n]) for n in names}})
    assert kf_runtime.status().hits == 1


def test_the_generic_path_alone(tensors: dict[str, torch.Tensor], fake: FakeDriver) -> None:
    """generic_path never reaches a kernel, counts nothing, and compiles whole."""
    from kf_runtime.ops.triangle_multiplicative_update import generic_path

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(generic_path(**tensors), formula(tensors))
        compiled = torch.compile(generic_path, fullgraph=True, backend="aot_eager", dynamic=False)
        torch.testing.assert_close(compiled(**tensors), formula(tensors), rtol=2e-2, atol=2e-2)
    assert fake.launches == [] and kf_runtime.status().generic == {}


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile", "force_eager"])
def test_what_runs_eagerly_below_dynamo_is_not_compiled(
    tensors: dict[str, torch.Tensor], fake: FakeDriver, stance: str
) -> None:
    """A stance that runs a caller as it is: our host code below it decides and launches, and no frame of it breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = tensors.pop("x")

    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = update(x, **tensors)
        return kf_runtime.residual_layer_norm(x, x, tensors["norm_in_weight"], tensors["norm_in_bias"])

    compiled = torch.compile(block, backend="aot_eager")
    with torch.no_grad(), torch.compiler.set_stance(stance):
        for calls in (1, 2, 3):
            compiled(x)
            assert len(fake.launches) == 9 * calls
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
