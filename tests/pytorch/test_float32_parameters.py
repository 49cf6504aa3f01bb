"""A BF16 pair with float32 parameters on the emulated driver, with real launches: numbers, replay, compile."""

from __future__ import annotations

from tests.pytorch.conftest import Emulated

MIXED = """
from kernel_factory.parameters import unrounded

def mixed(cell, seed=11):
    "A call whose float32 parameters no BF16 holds, and the BF16 call that it rounds to."
    inputs = trimul_inputs(cell, "random", seed)
    return (dict(values, direction=cell.direction) for values in (unrounded(inputs, seed), inputs))
"""


def test_every_small_cell_is_near_the_oracle_of_unrounded_parameters(emulated: Emulated) -> None:
    """Within the policy's bar of the float64 oracle, three launches, and the bits of the BF16 call it rounds to."""
    found = emulated(
        MIXED
        + """
driver, rows = start(), []
with torch.no_grad():
    for one in (SMALLEST, LARGER, ODD):
        call, narrow = mixed(one)
        before = driver.launches
        out = update(**call)
        launches = driver.launches - before
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same = torch.equal(update(**call), out)
        rows.append((launches, relative_error(out, oracle(one, call)), same, torch.equal(out, update(**narrow))))
answer(rows=rows)
"""
    )
    assert [row[0] for row in found["rows"]] == [3, 3, 3]
    assert all(4e-3 < row[1] <= 1.2e-2 for row in found["rows"]), found["rows"]
    assert all(row[2] and row[3] for row in found["rows"])


def test_a_graph_replays_the_parameters_of_its_replay(emulated: Emulated) -> None:
    """Captured once: the rounding is recorded with the launches, and a replay sees an optimizer's step and `.data`.

    The emulated driver records launches; the test records torch's copy beside them, as a CUDA graph would.
    """
    found = emulated(
        MIXED
        + """
driver, (call, _) = start(), mixed(SMALLEST)
weight = call["p_in_weight"] = torch.nn.Parameter(call["p_in_weight"])
optimizer = torch.optim.SGD([weight], lr=0.5)
kf_runtime.preload(SMALLEST)
pool, copies, new_empty, copy = [], [], torch.Tensor.new_empty, torch._foreach_copy_

def recorded(narrow, wide):
    copies.append((narrow, wide))
    copy(narrow, wide)

errors = []
with torch.no_grad():
    torch.Tensor.new_empty = lambda self, *a, **k: pool.append(new_empty(self, *a, **k)) or pool[-1]
    torch._foreach_copy_ = recorded
    with driver.capture() as graph:
        out = update(**call)
    torch.Tensor.new_empty, torch._foreach_copy_ = new_empty, copy

    def replay():
        for narrow, wide in copies:
            copy(narrow, wide)
        graph.replay()
        errors.append(relative_error(out, oracle(SMALLEST, call)))

    replay()
    first = out.clone()
    weight.grad = torch.randn(weight.shape)
    optimizer.step()
    replay()
    call["norm_out_weight"].data.add_(0.25)
    replay()
answer(errors=errors, copies=len(copies), launches=len(graph.launches), violations=driver.capture_violations,
       moved=relative_error(out, first), generic=kf_runtime.status().generic.get("capturing", 0))
"""
    )
    assert found["copies"] == 1 and found["launches"] == 3 and found["violations"] == found["generic"] == 0
    assert max(found["errors"]) <= 1.3e-2 and found["moved"] > 0.1


def test_inductor_rounds_within_the_operator(emulated: Emulated) -> None:
    """One graph, three launches a call, new values of the parameters read at each call."""
    found = emulated(
        MIXED
        + """
driver, (call, _), errors = start(), mixed(SMALLEST), []
compiled = torch.compile(lambda k: update(**k), fullgraph=True)
with torch.no_grad():
    for _ in range(2):
        before = driver.launches
        out = compiled(call)
        errors.append((driver.launches - before, relative_error(out, oracle(SMALLEST, call))))
        call["p_in_weight"].data.mul_(-1.5)
answer(errors=errors, graphs=kf_runtime.status().graphs)
"""
    )
    assert [launches for launches, _ in found["errors"]] == [3, 3] and found["graphs"] == {"kf": 1}
    assert max(error for _, error in found["errors"]) <= 1.2e-2
