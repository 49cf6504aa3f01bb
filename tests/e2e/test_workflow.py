"""The CI workflow: it holds no logic, and every one of its commands runs here, on one SM and one small cell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernel_factory.toolchain import SMS
from tests.conftest import Small
from tests.e2e.conftest import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "kernels.yml"
CELL = "/B1.N64.C64.D64/incoming/mask/"  # of the small set
PINNED = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}")
COMMAND = re.compile(r"make [a-z-]+( [A-Z]+=[\w.]+)*")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """The parsed workflow."""
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def _steps(workflow: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            yield job, step


def _commands(workflow: dict[str, Any]) -> list[str]:
    """Every command, the matrix filled in."""
    filled = []
    for job, step in _steps(workflow):
        for sm in job.get("strategy", {}).get("matrix", {}).get("sm", [""]):
            if "run" in step:
                filled.append(step["run"].replace("${{ matrix.sm }}", sm))
    return filled


def test_schema_and_lint() -> None:
    """The file is a workflow by GitHub's schema, and by actionlint."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lint = Path(sys.executable).with_name("actionlint")
    done = subprocess.run([lint, WORKFLOW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    broken = subprocess.run(
        [lint, "-"],
        input=WORKFLOW.read_text().replace("matrix.sm", "matrix.gpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert broken.returncode == 1 and 'property "gpu" is not defined' in broken.stdout


def test_structure(workflow: dict[str, Any]) -> None:
    """Read permission alone, no secret, actions by commit, all SMs, and needs and matrix names that exist."""
    text, jobs = WORKFLOW.read_text(), workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in jobs.values())
    assert "secrets." not in text and "pull_request_target" not in text
    assert all(PINNED.fullmatch(step["uses"]) for _, step in _steps(workflow) if "uses" in step)
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        assert ("matrix." in json.dumps(job)) == ("strategy" in job)
        assert job["timeout-minutes"] <= 360
    assert [jobs[name]["strategy"]["matrix"]["sm"] for name in ("sm", "rebuild")] == [list(SMS), list(SMS)]


def test_own_machines_run_no_pull_request(workflow: dict[str, Any]) -> None:
    """A self-hosted runner works for a maintainer's dispatch alone: a pull request could run anything there."""
    own = [job for job in workflow["jobs"].values() if "self-hosted" in job["runs-on"]]
    assert [job["if"] for job in own] == ["github.event_name == 'workflow_dispatch' && inputs.device"]


def test_every_command_is_a_make_target(workflow: dict[str, Any]) -> None:
    """No shell in the workflow: one make target a step, and make knows it."""
    commands = _commands(workflow)
    assert len(commands) == 6 * (4 + 2) + 3 + 2
    for command in sorted(set(commands)):
        assert COMMAND.fullmatch(command), command
        done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_target_without_its_sm_says_so() -> None:
    """`make sm-build` alone names the SMs."""
    done = subprocess.run(["make", "sm-build", "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "SM: expected one of sm_80 sm_89" in done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout's files as a commit of a repository of their own."""
    folder = tmp_path_factory.mktemp("ci") / "checkout"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".store", "build", "*.egg-info", "__pycache__", ".*_cache", "data"
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", "-C", folder]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "as it stands"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    return folder


def test_commands_of_one_sm(workflow: dict[str, Any], checkout: Path, small: Small, clean_environment: Path) -> None:
    """In the workflow's order: build, prove, bundle, rebuild from a clone, join, test the wheel, check the device.

    The device is the emulated one, the environment this one, and the store holds the small set.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "runtime"))),
        "KF_STORE": str(small.selection.workspace.store_root),
    }
    given = [
        f"BIN={Path(sys.executable).parent}",
        "SMS=sm_90a",
        f"CELLS={CELL}",
        f"CLEAN={clean_environment}",
        "JOBS=1",
    ]
    said = {}
    for command in dict.fromkeys(command.split()[1] for command in _commands(workflow)):
        options = ["SM=sm_90a"] if command.startswith("sm-") or command == "rebuild" else []
        options += ["DEVICE_OPTIONS=--emulated sm_90a --no-timing"] if command == "device-check" else []
        done = subprocess.run(
            ["make", command, *given, *options],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
    assert list(said) == [
        *("setup", "sm-build", "sm-prove", "sm-bundle", "rebuild", "join", "wheel-test", "device-check")
    ]
    assert "pip" not in said["setup"]  # an environment that is given is taken as it is
    assert "1 of 1 cells admitted" in said["sm-prove"]
    assert "3 kernels rebuilt, every cubin and PTX the same" in said["rebuild"]
    assert "1 cells of 1 SMs, 3 cubins" in said["join"]
    assert "1 cells of 1 SMs in" in said["wheel-test"]
    assert "1 of 1 cells ran their cubins; 0 failed" in said["device-check"]
    statement = subprocess.run(
        ["tar", "-xOf", checkout / "build/bundles/sm_90a.tar", "provenance.json"], check=True, capture_output=True
    )
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    source = json.loads(statement.stdout)["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert source["digest"] == {"gitCommit": commit.stdout.strip()}
    assert source["annotations"] == {"clean": True}
