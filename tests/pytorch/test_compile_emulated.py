"""torch.compile with Inductor, export and ONNX on the emulated driver, with real launches on host tensors."""

from __future__ import annotations

import importlib.util

import pytest

from tests.pytorch.conftest import Emulated


def test_inductor_runs_kernels_where_admitted_and_the_formula_elsewhere(emulated: Emulated) -> None:
    """Admitted, declined, admitted, declined: each is right, kernels run at admitted shapes, no graph break."""
    found = emulated(
        """
        import torch._dynamo.utils
        driver = start()

        def block(x, mask, w):
            return 2 * update(x * 1, "incoming", mask, **w) + x

        compiled = torch.compile(block, fullgraph=True)
        rows = []
        weights = {k: torch.nn.Parameter(v, requires_grad=False) for k, v in named(SMALLEST).items()
                   if k not in ("x", "mask", "direction")}
        with torch.no_grad():
            for n in (64, 48, 64, 40):
                one = cell(n)
                call = {**named(one), **weights}
                before = driver.launches
                out = compiled(call["x"], call["mask"], weights)
                error = relative_error((out - call["x"]) / 2, oracle(one, call))
                rows.append((n, driver.launches - before, error))
        answer(rows=rows, breaks=len(torch._dynamo.utils.counters["graph_break"]),
               graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"], status=kf_runtime.status().graphs)
        """
    )
    assert [row[:2] for row in found["rows"]] == [[64, 3], [48, 0], [64, 3], [40, 0]]
    assert max(row[2] for row in found["rows"]) <= 2e-2
    assert found["breaks"] == 0 and found["graphs"] == 2


def test_compiled_code_reads_no_file(emulated: Emulated) -> None:
    """Tracing neither breaks at posix.stat nor makes Dynamo trace our file reads; a new function finds all in place."""
    found = emulated(
        """
        driver, call = start("stub"), named(SMALLEST)
        torch._dynamo.config.error_on_recompile = True
        with torch.no_grad():
            first = torch.compile(lambda **k: update(**k), fullgraph=True, backend="eager")
            for seed in (1, 2, 3):
                first(**named(SMALLEST, seed))
            explained = torch._dynamo.explain(lambda **k: update(**k))(**call)
        answer(graphs=explained.graph_count, breaks=explained.graph_break_count, launches=driver.launches,
               kernels=sum("kf" in str(op) for op in explained.ops_per_graph[0]))
        """
    )
    assert found["graphs"] == 1 and found["breaks"] == 0 and found["kernels"] == 1 and found["launches"] >= 9


def test_reduced_dispatch_state_does_not_recompile(emulated: Emulated) -> None:
    """Other cells, other functions and declined calls in between change nothing that a graph is guarded by."""
    found = emulated(
        """
        driver = start("stub")
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        def compiled(direction):
            return torch.compile(lambda x, mask, w: update(x, direction, mask, **w), fullgraph=True, backend=backend)

        def tensors(one):
            call = named(one)
            return call.pop("x"), call.pop("mask", None), {k: v for k, v in call.items() if k != "direction"}

        with torch.no_grad():
            incoming = compiled("incoming")
            incoming(*tensors(SMALLEST))
            first = len(graphs)
            compiled("outgoing")(*tensors(LARGER))
            compiled("incoming")(*tensors(ODD))
            update(**named(LARGER)), update(**named(cell(32)))
            kf_runtime.preload()
            before = len(graphs)
            incoming(*tensors(SMALLEST))
        answer(first=first, more=len(graphs) - before)
        """
    )
    assert found["first"] == 1 and found["more"] == 0


def test_an_exported_program_runs_where_there_are_no_cubins(emulated: Emulated, tmp_path_factory) -> None:
    """torch.export, strict and not, of an admitted call: aten alone, saved, and run by a process without kf_runtime."""
    import os
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("export")
    found = emulated(
        """
        driver, call = start("stub"), named(SMALLEST)
        weights = {k: v for k, v in call.items() if k not in ("x", "mask", "direction")}

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, value in weights.items():
                    self.register_buffer(name, value)

            def forward(self, x, mask):
                return update(x, "incoming", mask, **dict(self.named_buffers()))

        N = torch.export.Dim("N", min=2, max=512)
        names = []
        with torch.no_grad():
            for strict in (False, True):
                program = torch.export.export(Model(), (call["x"], call["mask"]), strict=strict,
                                              dynamic_shapes={"x": {1: N, 2: N}, "mask": {1: N, 2: N}})
                names += [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
                torch.export.save(program, f"{os.environ['FOLDER']}/{strict}.pt2")
            expected = kf_runtime.ops.triangle_multiplicative_update.generic_path(**call)
            torch.save((call["x"], call["mask"], expected), f"{os.environ['FOLDER']}/call.pt")
        answer(names=names, launches=driver.launches)
        """,
        FOLDER=str(folder),
    )
    assert found["launches"] == 0
    assert not [name for name in found["names"] if "kf" in name or not name.startswith(("aten", "<built-in", "_op"))]
    code = f"""
import sys
sys.modules["kf_runtime"] = None
import torch
x, mask, expected = torch.load("{folder}/call.pt")
for strict in (False, True):
    out = torch.export.load(f"{folder}/{{strict}}.pt2").module()(x, mask)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert out.float().norm() > 0
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnx and onnxscript are not installed")
def test_onnx_needs_no_translation(emulated: Emulated, tmp_path_factory) -> None:
    """torch.onnx.export with dynamo=True: no operator of ours, and the reference evaluator gives the generic result."""
    found = emulated(
        """
        import onnx
        driver, small = start("stub"), named(cell(8))
        call = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in small.items()}
        weights = {k: v for k, v in call.items() if k not in ("x", "mask", "direction")}

        class Model(torch.nn.Module):
            def forward(self, x, mask):
                return update(x, "incoming", mask, **weights)

        with torch.no_grad():
            program = torch.onnx.export(Model().eval(), (call["x"], call["mask"]), dynamo=True, verbose=False)
        model = program.model_proto
        domains = sorted({node.domain for node in model.graph.node})
        from onnx.reference import ReferenceEvaluator
        feed = {i.name: t.numpy() for i, t in zip(model.graph.input, (call["x"], call["mask"]))}
        out = ReferenceEvaluator(model).run(None, feed)[0]
        with torch.no_grad():
            expected = update(**call)
        error = float((torch.from_numpy(out) - expected).norm() / expected.norm())
        answer(domains=domains, error=error, launches=driver.launches)
        """
    )
    assert set(found["domains"]) <= {"", "pkg.onnxscript.torch_lib.common"} and found["launches"] == 0
    assert found["error"] <= 1e-4
