"""Admission: a pure function that fails closed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kf_runtime.cell import Cell

from kernel_factory.admit import Admitted, Rejected, admit
from kernel_factory.cli import main
from kernel_factory.evidence import Evidence
from kernel_factory.policy import Policy, read_policy

CELL = Cell(op="triangle_multiplicative_update", B=1, N=64, C=128, D=128, direction="outgoing", mask=True, sm="sm_90a")
FIGURES = {"model_norm": 1e-4, "model_worst_row": 2e-3, "oracle_norm": 4.5e-3, "model_to_oracle": 4.5e-3}
ADMITTED = Admitted(parameter_dtypes=("bf16", "f32"))
FACTS = {"stack_bytes": 0, "registers": 100, "forbidden_opcodes": []}


def policy() -> Policy:
    """The committed policy."""
    return read_policy(Path(__file__).parents[3] / "allowlists" / "policy.toml")[CELL.op]


def evidence(**changes: Any) -> Evidence:
    """Evidence that meets every bar, with changes."""
    launches = tuple(
        {"kernel": k, "cubin": k, "ptx": k, "facts": FACTS, "counters": {"traffic_ratio": 1.0, "wavefront_ratio": 1.0}}
        for k in ("project", "contract", "finalize")
    )
    good: dict[str, Any] = {
        "cell": CELL,
        "level": "emulated",
        "product": "KF Emulated sm_90a",
        "toolchain": "t",
        "seed": 1,
        "coverage": "chained",
        "launches": launches,
        "numerics": {"random": FIGURES, "gate-out-x20": FIGURES},
        "findings": {"lockstep": [], "warp-serial": [], "race": []},
    }
    found = {**good, **changes}
    found.setdefault("float32_parameters", dict.fromkeys(found["numerics"], 0.0065))
    return Evidence(**found)


def reasons(found: Evidence) -> str:
    """The rejection's reasons as one text; fails where the verdict is Admitted."""
    verdict = admit(found, policy())
    assert isinstance(verdict, Rejected)
    return "\n".join(verdict.reasons)


def test_a_file_that_is_no_evidence_is_a_sentence(tmp_path: Path) -> None:
    """`kf admit --device` of another file names it and takes nothing in."""
    file = tmp_path / "evidence.json"
    for text in ("# a page", '{"cell": 1}', "[1]"):
        file.write_text(text)
        done = CliRunner().invoke(main, ["admit", "--sm", "sm_90a", "--device", str(file)])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert f"{file}: expected a list of evidence" in done.output


def test_good_evidence_is_admitted() -> None:
    """Evidence within every bar is admitted."""
    assert admit(evidence(), policy()) == ADMITTED


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("model_norm", 1.6e-3, "rounding model"),
        ("model_worst_row", 1.1e-2, "worst row"),
        ("oracle_norm", 5.0e-3, "oracle"),
        ("model_norm", math.nan, "nan"),
        ("model_norm", None, "None"),
    ],
)
def test_numerics_bars(figure: str, value: float | None, said: str) -> None:
    """Each figure past its bar, not a number, or absent rejects, and the reason names it."""
    assert said in reasons(evidence(numerics={"random": FIGURES, "x": {**FIGURES, figure: value}}))


def test_absolute_oracle_bar_on_random_inputs() -> None:
    """On random inputs a model far from the oracle does not excuse the kernel."""
    far = {**FIGURES, "oracle_norm": 7e-3, "model_to_oracle": 7e-3}
    assert "6e-03" in reasons(evidence(numerics={"random": far})) or "0.006" in reasons(
        evidence(numerics={"random": far})
    )
    assert admit(evidence(numerics={"random": FIGURES, "gate-in-x20": far}), policy()) == ADMITTED


def test_missing_random_set_rejects() -> None:
    """Without the random set there is no admission."""
    assert "random" in reasons(evidence(numerics={"gate-out-x20": FIGURES}))


def test_missing_mode_rejects() -> None:
    """Every mode of the policy must have run."""
    assert "race" in reasons(evidence(findings={"lockstep": [], "warp-serial": []}))


def test_a_finding_rejects() -> None:
    """One finding in one mode is enough, and its text is in the reason."""
    found = evidence(findings={"lockstep": [], "warp-serial": [], "race": ["race at line 7"]})
    assert "race at line 7" in reasons(found)


@pytest.mark.parametrize(
    ("kernel", "counters", "said"),
    [
        ("project", {"traffic_ratio": 1.06, "wavefront_ratio": 1.0}, "traffic"),
        ("finalize", {"wavefront_ratio": 1.0}, "traffic"),
        ("contract", {"traffic_ratio": 3.0, "wavefront_ratio": 1.2}, "wavefront"),
    ],
)
def test_counter_bars(kernel: str, counters: dict[str, float], said: str) -> None:
    """Traffic and wavefront ratios past their bars, or absent, reject."""
    launches = tuple(
        {**launch, "counters": counters} if launch["kernel"] == kernel else launch for launch in evidence().launches
    )
    assert said in reasons(evidence(launches=launches))


def test_contract_has_no_traffic_bar() -> None:
    """The contraction re-reads its operands by design; its factor is printed, not barred."""
    launches = tuple(
        {**launch, "counters": {"traffic_ratio": 6.0, "wavefront_ratio": 1.0}}
        if launch["kernel"] == "contract"
        else launch
        for launch in evidence().launches
    )
    assert admit(evidence(launches=launches), policy()) == ADMITTED


@pytest.mark.parametrize("facts", [{**FACTS, "stack_bytes": 8}, {**FACTS, "forbidden_opcodes": ["rcp.rn"]}])
def test_spills_and_slow_opcodes_reject(facts: dict[str, Any]) -> None:
    """A stack frame or a slow opcode rejects."""
    launches = tuple({**launch, "facts": facts} for launch in evidence().launches)
    assert admit(evidence(launches=launches), policy()) != ADMITTED


def test_timing_from_the_emulator_is_refused() -> None:
    """A time counts only if it came from a GPU."""
    with pytest.raises(ValueError, match="GPU"):
        evidence(timing={"us": 1.0})


def test_digest_covers_every_figure() -> None:
    """Evidence that differs anywhere has another digest, and survives a round trip."""
    one = evidence()
    assert Evidence.from_json(one.to_json()).digest == one.digest
    assert replace(one, seed=2).digest != one.digest


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"random": 6.5e-3, "gate-out-x20": 8e-3}, None),
        ({"random": 1.195e-2, "gate-out-x20": 8e-3}, "random: error against the oracle: expected at most 0.012"),
        ({"random": 6.5e-3, "gate-out-x20": math.nan}, "gate-out-x20"),
        ({"random": 6.5e-3}, "gate-out-x20.*found nan"),
        ({}, "random.*found nan"),
    ],
)
def test_float32_parameters_have_a_gate_of_their_own(measured: dict[str, float], said: str | None) -> None:
    """The model's error and the kernel's own (1e-4) together, on every set; else BF16 parameters alone, and why."""
    verdict = admit(evidence(float32_parameters=measured), policy())
    assert isinstance(verdict, Admitted)
    assert verdict.parameter_dtypes == (("bf16", "f32") if said is None else ("bf16",))
    assert bool(verdict.declined) == (said is not None) and re.search(said or "", "; ".join(verdict.declined))


def test_float32_parameters_need_a_bar() -> None:
    """A policy that says nothing of float32 parameters admits none; a set that it names has a bar of its own."""
    silent = admit(evidence(), replace(policy(), float32_parameters={}))
    assert isinstance(silent, Admitted) and silent.parameter_dtypes == ("bf16",)
    far = evidence(float32_parameters={"random": 6.5e-3, "gate-out-x20": 3e-2})
    named = replace(policy(), float32_parameters={"oracle": 1.2e-2, "gate-out-x20": 4e-2})
    assert admit(far, policy()) != ADMITTED and admit(far, named) == ADMITTED
