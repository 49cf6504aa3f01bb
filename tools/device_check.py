"""The device check: every shipped cell of this GPU's SM, run through the wheel and compared.

Needs torch >= 2.11, cuda-bindings and the built wheel; no DSL, no compiler. Runs in `preview`
and fails unless each cell's Route is UseCubin, the launch counter rises by the Plan's launches (a
generic answer would match the oracle too), and the figures meet allowlists/policy.toml. Writes evidence.json and
summary.json into --out; `kf admit --device OUT/evidence.json` takes the evidence in.

    tools/device_check.sh OUT [--emulated SM] [--cell TEXT] [--no-timing]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["CUEQ_TRIMUL_KF_CAMPAIGN"] = "preview"
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # after the wheel's folder, which PYTHONPATH names

import torch

from kernel_factory import measure, reference
from kernel_factory.admit import Rejected, admit
from kernel_factory.evidence import Evidence
from kernel_factory.families.trimul_mma.model import ROW_AXES, model
from kernel_factory.policy import read_policy

COMPILED_AT = (128, 384, 768)
ENOUGH_F64 = 128  # up to this N the model runs in float64; larger ones in float32, whose error is 1e-6


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for evidence files and summary.json")
    parser.add_argument("--emulated", metavar="SM", help="run on the emulated driver of this SM instead of a GPU")
    parser.add_argument("--cell", default="", help="only keys that hold this text")
    parser.add_argument("--no-timing", action="store_true", help="numerics alone")
    return parser.parse_args()


class Checker:
    """Runs cells through the wheel on one device."""

    def __init__(self, emulated: str | None) -> None:
        if emulated:
            from kernel_factory.emulator import install_driver

            install_driver(emulated)
        import kf_runtime
        from kf_runtime import dispatch

        self.op = kf_runtime.triangle_multiplicative_update
        self.explain = kf_runtime.explain
        self.status = kf_runtime.status
        self.device = torch.device("cpu" if emulated else "cuda")
        self.system = dispatch.current().system(0)
        self.manifest = dispatch.current().manifest()
        self.route_taken = kf_runtime.UseCubin

    def run(self, cell: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """One call. Raises RuntimeError unless it ran the cell's cubins, by route and by launch count."""
        operands = dict(inputs)
        args = (operands.pop("x"), cell.direction, operands.pop("mask", None))
        route = self.explain("triangle_multiplicative_update", *args, **operands)
        if not isinstance(route, self.route_taken) or route.cell != cell:
            raise RuntimeError(f"{cell}: expected the cubin path; found {route}")
        before = self.status().launches
        out = self.op(*args, **operands)
        risen = self.status().launches - before
        if risen != len(route.plan.launches):
            raise RuntimeError(f"{cell}: expected {len(route.plan.launches)} launches; the counter rose by {risen}")
        return out

    def numerics(self, entry: Any) -> tuple[dict[str, Any], list[str]]:
        """Every input set of a cell against the rounding model and the float64 oracle, and repeatability."""
        cell, ref = entry.cell, reference.REFERENCES[entry.cell.op]
        seed = int(entry.evidence[:12], 16)
        figures, findings = {}, []
        for name in ref.input_sets(cell):
            inputs = {k: v.to(self.device) for k, v in ref.inputs(cell, name, seed).items()}
            out = self.run(cell, inputs)
            if not torch.equal(out.view(torch.int16), self.run(cell, inputs).view(torch.int16)):
                findings.append(f"{name}: the same input twice gave different bits")
            wide = torch.float64 if cell.N <= ENOUGH_F64 else torch.float32
            expected, oracle = model(cell, inputs, wide)["out"], ref.oracle(cell, inputs)
            figures[name] = {
                "model_norm": reference.relative_error(out, expected),
                "model_worst_row": reference.worst_row(out, expected, ROW_AXES["out"]),
                "oracle_norm": reference.relative_error(out, oracle),
                "model_to_oracle": reference.relative_error(expected, oracle),
            }
        return figures, findings

    def timing(self, entry: Any) -> dict[str, Any]:
        """KF against the generic path, eager and graph replay, warm and cold; the compiled formula at a few N."""
        cell, ref = entry.cell, reference.REFERENCES[entry.cell.op]
        one = {k: v.to(self.device) for k, v in ref.inputs(cell, "random", 1).items()}
        sets = measure.operand_sets(2 * one["x"].numel() * one["x"].element_size())
        pairs = [{**one, **{k: one[k].clone() for k in ("x", "mask") if k in one}} for _ in range(sets)]
        calls = {"kf": self.caller(cell, pairs), "generic": self.caller(cell, pairs, generic=True)}
        figures: dict[str, Any] = {}
        with torch.no_grad():
            if cell.N in COMPILED_AT and cell.direction == "outgoing" and cell.mask:
                torch._dynamo.reset()
                calls["compiled"] = self.caller(cell, pairs, generic=True, compiled=True)
            for temperature, count in (("warm", 1), ("cold", sets)):
                eager = [measure.Arm(name=name, call=call) for name, call in calls.items()]
                replay = [measure.Arm(name=n, call=measure.graphed(c, count)) for n, c in calls.items()]
                figures[f"eager/{temperature}"] = {n: asdict(t) for n, t in measure.compare(eager, count).items()}
                figures[f"graph/{temperature}"] = {n: asdict(t) for n, t in measure.compare(replay, count).items()}
        return figures

    def caller(self, cell: Any, pairs: list[dict[str, Any]], generic: bool = False, compiled: bool = False) -> Any:
        """A call of one arm on operand set i: same dtypes, mask and inputs for every arm."""
        from kf_runtime.ops.triangle_multiplicative_update import generic_path

        function = generic_path if generic else self.op
        if compiled:
            function = torch.compile(function, dynamic=False)

        def call(i: int) -> Any:
            operands = dict(pairs[i])
            return function(operands.pop("x"), cell.direction, operands.pop("mask", None), **operands)

        return call

    def evidence(self, entry: Any, with_timing: bool) -> Evidence:
        """Device evidence of one entry."""
        plan = self.manifest.plan_of(entry)
        figures, findings = self.numerics(entry)
        timing = self.timing(entry) if with_timing else {}
        records = [self.manifest.cubins[launch.cubin] for launch in plan.launches]
        return Evidence(
            cell=entry.cell,
            level="device",
            product=self.system.product,
            toolchain=f"driver {self.system.driver_version}, torch {torch.__version__}",
            seed=int(entry.evidence[:12], 16),
            coverage="chained",
            launches=tuple(
                {"kernel": launch.kernel, "cubin": launch.cubin, "ptx": record.ptx_sha256}
                for launch, record in zip(plan.launches, records, strict=True)
            ),
            numerics=figures,
            findings={"device": findings},
            timing=timing,
        )


def main() -> int:
    """Check every entry; 0 when all of them are right."""
    options = arguments()
    checker = Checker(options.emulated)
    entries = [e for e in checker.manifest.on_sm(checker.system.sm) if options.cell in e.cell.key]
    print(
        f"{checker.system.product}, driver {checker.system.driver_version}: {len(entries)} cells of {checker.system.sm}"
    )
    timed = not options.no_timing and not options.emulated
    summary: dict[str, Any] = {"product": checker.system.product, "driver": checker.system.driver_version, "failed": {}}
    summary["ceilings"] = measure.ceilings() if timed else {}
    print(json.dumps(summary["ceilings"]))
    options.out.mkdir(parents=True, exist_ok=True)
    policies = read_policy(ROOT / "allowlists" / "policy.toml")
    found = []
    for entry in entries:
        start = time.monotonic()
        try:
            result = checker.evidence(entry, timed)
        except RuntimeError as error:
            summary["failed"][entry.cell.key] = str(error)
            print(f"FAILED {entry.cell.key}: {error}")
            continue
        verdict = admit(result, policies[entry.cell.op])
        if isinstance(verdict, Rejected):
            summary["failed"][entry.cell.key] = "; ".join(verdict.reasons)
            print(f"REJECTED {entry.cell.key}: {summary['failed'][entry.cell.key]}")
        found.append(result.to_json())
        worst = max(f["model_norm"] for f in result.numerics.values())
        print(
            f"{entry.cell.key}: worst error {worst:.2e}, {time.monotonic() - start:.1f} s {_speed(result.timing)}",
            flush=True,
        )
        (options.out / "evidence.json").write_text(json.dumps(found))
    summary["status"] = checker.status().to_json()
    (options.out / "summary.json").write_text(json.dumps(summary, default=str, indent=1))
    print(f"{len(found)} of {len(entries)} cells ran their cubins; {len(summary['failed'])} failed")
    return 0 if entries and len(found) == len(entries) and not summary["failed"] else 1


def _speed(timing: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}: " + " / ".join(f"{arm} {figures['median_us']:.1f} us" for arm, figures in arms.items())
        for name, arms in timing.items()
    )


if __name__ == "__main__":
    sys.exit(main())
