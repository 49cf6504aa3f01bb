"""The JIT form of a family, end to end: the wheel, the compiler, the host code it emits, and the emulated driver."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from kernel_factory import jit, jit_form
from kernel_factory.store import Store
from tests.conftest import Small
from tests.e2e.conftest import PRELUDE, ROOT, answer_of

CELL = "triangle_multiplicative_update/inference/bf16.bf16/B1.N64.C64.D64/incoming/mask/nobias/sm_90a"
Run = Callable[..., dict[str, Any]]

CALL = """
driver = install_driver("sm_90a")
import kf_runtime
one = cell(n=64, direction="incoming", c=64)
args, named = operands(one)
op = kf_runtime.triangle_multiplicative_update
def explain(): return str(kf_runtime.explain(op.__name__, *args, **named))
"""


@pytest.fixture(scope="session")
def run(site: Path, small: Small) -> Run:
    """Run code in a process that sees the wheel, then ``path``, then the checkout; its last line is its answer."""

    def go(code: str, path: tuple[Path, ...] = (), **variables: str) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, *path, ROOT)))}
        environment |= {"KF_STORE": str(small.selection.workspace.store_root), **variables}
        return answer_of(PRELUDE + CALL + textwrap.dedent(code), environment)

    return go


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> Path:
    """A folder to put on the path, that holds the metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """The factory as pip would install it, as far as its entry points go."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kf_runtime.providers"]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    return distribution(tmp_path / "factory", "kernel-factory", "0.1.0", f"[kf_runtime.providers]\n{lines}")


@pytest.mark.parametrize(
    "which", ['n=64, direction="incoming", c=64', 'n=100, direction="incoming", mask=False'], ids=["small", "padded"]
)
def test_same_bits_as_the_cubin(run: Run, which: str) -> None:
    """One process runs a cell's cubins, then its JIT form: equal bits, right values, one library of its own."""
    answer = run(
        f"""
        import kernel_factory.jit
        one = cell({which})
        args, named = operands(one)
        oracle = trimul_oracle(one, dict(named, x=args[0]) | ({{}} if args[2] is None else {{"mask": args[2]}}))
        named = {{name: torch.nn.Parameter(value) for name, value in named.items()}}
        with torch.no_grad():
            cubin, loads = op(*args, **named), [driver.loads]
            kernel_factory.jit.register("trimul_mma", [one])
            route, first, again, loads = explain(), op(*args, **named), op(*args, **named), [*loads, driver.loads]
            unbatched = op(args[0][0], args[1], None if args[2] is None else args[2][0], **named)
        equal = [torch.equal(cubin, other) for other in (first, again, unbatched[None])]
        print(json.dumps(dict(
            equal=equal, norm=relative_error(first, oracle), launches=driver.launches, route=route, loads=loads,
            jit=kf_runtime.status().jit, generic=kf_runtime.status().generic)))
        """
    )
    assert answer["equal"] == [True, True, True]
    assert answer["norm"] <= 6e-3
    assert (answer["launches"], answer["loads"], answer["jit"]) == (12, [3, 4], {"trimul_mma": 3})
    assert answer["route"].startswith("JIT path") and answer["generic"].keys() <= {"dtype"}


def test_asked_for_by_variable_through_the_entry_point(run: Run, factory: Path) -> None:
    """KF_JIT finds the family through the entry point of an installed factory; the product is the emulated one."""
    code = """
    out = op(*args, **named)
    print(json.dumps(dict(route=explain(), jit=kf_runtime.status().jit, launches=driver.launches)))
    """
    answer = run(code, (factory,), KF_JIT="trimul_mma")
    assert answer["route"].startswith("JIT path")
    assert (answer["jit"], answer["launches"]) == ({"trimul_mma": 1}, 3)


def test_provider_is_imported_only_if_asked_for(run: Run, tmp_path: Path) -> None:
    """A provider's module is imported with KF_JIT alone; unset, off, or no call: never."""
    folder = distribution(tmp_path, "poison", "1", "[kf_runtime.providers]\npoison = poison:provide\n")
    (folder / "poison.py").write_text("def provide():\n    return []\n")
    code = """
    op(*args, **named), explain(), kf_runtime.status()
    print(json.dumps(dict(read="poison" in sys.modules, launches=driver.launches, route=explain())))
    """
    assert run(code, (folder,))["read"] is False
    assert run(code, (folder,), KF_JIT="nobody", CUEQ_TRIMUL_KF_CAMPAIGN="off")["read"] is False
    asked = run(code, (folder,), KF_JIT="nobody")  # the factory itself may be installed here, and know trimul_mma
    assert asked["read"] is True and asked["launches"] == 0
    assert "found nobody" in asked["route"] and asked["stderr"].count("Warning") == 1


def test_other_versions_keep_the_generic_path(run: Run, factory: Path, tmp_path: Path) -> None:
    """Another tvm-ffi, or none: generic, and the reason names what was found and what is needed."""
    code = """
    out = op(*args, **named)
    norm = relative_error(out, trimul_oracle(one, dict(named, x=args[0], mask=args[2])))
    print(json.dumps(dict(route=explain(), norm=norm, launches=driver.launches)))
    """
    missing = """
    import kernel_factory.jit
    from importlib.metadata import PackageNotFoundError, version
    def absent(name):
        if "tvm" in name: raise PackageNotFoundError(name)
        return version(name)
    kernel_factory.jit.version = absent
    """
    other = distribution(tmp_path / "other", "apache-tvm-ffi", "0.1.9")
    answers = {
        "0.1.9": run(code, (factory, other), KF_JIT="trimul_mma"),
        "none": run(textwrap.dedent(missing) + textwrap.dedent(code), (factory,), KF_JIT="trimul_mma"),
    }
    for found, answer in answers.items():
        assert f"apache-tvm-ffi: needs 0.1.14.post0; found {found}" in answer["route"]
        assert answer["launches"] == 0 and answer["norm"] <= 2e-2
        assert answer["stderr"].count("Warning") == 1


def test_eager_and_no_grad_only(run: Run) -> None:
    """A call that wants gradients and a call under torch.compile run the generic path; both say so."""
    answer = run(
        """
        import kernel_factory.jit
        kernel_factory.jit.register("trimul_mma")
        named = {name: value.requires_grad_() for name, value in named.items()}
        op(*args, **named).sum().backward()
        with torch.no_grad():
            torch.compile(op, backend="eager")(*args, **named)
        print(json.dumps(dict(
            launches=driver.launches, route=explain(), graphs=kf_runtime.status().graphs,
            grad=named["p_in_weight"].grad.float().norm().item())))
        """
    )
    assert answer["launches"] == 0 and answer["grad"] > 0
    assert "grad:" in answer["route"]
    assert answer["graphs"] == {"jit": 1}


FAULTS = [(("cuLibraryLoadData", 209), "NO_BINARY"), (("cuLaunchKernelEx", 719), "LAUNCH_FAILED")]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[name for _, name in FAULTS])
def test_a_failed_launch_is_an_error(run: Run, fault: tuple[str, int], name: str) -> None:
    """A driver error surfaces at the call and names itself; the function is not trusted again."""
    answer = run(
        f"""
        import kernel_factory.jit
        kernel_factory.jit.register("trimul_mma")
        errors = []
        with driver.fault{fault}:
            try: op(*args, **named)
            except kf_runtime.KfError as error: errors.append(str(error))
        try: op(*args, **named)
        except kf_runtime.KfError as error: errors.append(str(error))
        print(json.dumps(dict(errors=errors)))
        """
    )
    assert len(answer["errors"]) == 2
    assert all(name in error and "trimul_mma" in error for error in answer["errors"])


def test_two_processes_share_the_store(tmp_path: Path) -> None:
    """Started together on an empty store, one process compiles and both get the same library; a third only reads."""
    code = f"""
    import json, sys
    from pathlib import Path
    from kernel_factory import jit, jit_form
    from kernel_factory.store import Store, sha256
    request = jit.Request(package="kernel_factory.families.trimul_mma", cell={CELL!r}, emulated=True)
    image, fresh = jit.library(Store(root=Path(sys.argv[1])), request)
    print(json.dumps([fresh, sha256(image)]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime")))}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (json.loads(process.communicate()[0]) for process in started)
    assert sorted((first[0], second[0])) == [False, True]
    third = json.loads(subprocess.run(command, env=environment | {"PATH": ""}, capture_output=True, check=True).stdout)
    assert third[0] is False
    assert first[1] == second[1] == third[1]
    assert len(list((tmp_path / "store" / "records" / "jit").glob("*.json"))) == 1


def test_key_follows_what_the_bytes_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell, SM, form and pins each change the key."""
    package = "kernel_factory.families.trimul_mma"
    one = jit.Request(package=package, cell=CELL, emulated=True)
    others = [
        jit.Request(package=package, cell=CELL, emulated=False),
        jit.Request(package=package, cell=CELL.replace("N64", "N128"), emulated=True),
        jit.Request(package=package, cell=CELL.replace("sm_90a", "sm_80"), emulated=True),
    ]
    keys = {request.key() for request in (one, *others)}
    monkeypatch.setattr(jit, "PINS", (*jit.PINS, ("another", "1")))
    assert len({*keys, one.key()}) == 5


def test_form_for_a_gpu_launches_through_the_runtime(tmp_path: Path) -> None:
    """Linked for a device, a library loads and brings no stand-ins: its launches are left to the DSL's own runtime."""
    request = jit.Request(package="kernel_factory.families.trimul_mma", cell=CELL, emulated=False)
    image, _ = jit.library(Store(root=tmp_path), request)
    elf = ELFFile(io.BytesIO(image))
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    missing = {s.name for s in elf.get_section_by_name(".dynsym").iter_symbols() if s["st_shndx"] == "SHN_UNDEF"}
    assert {"libcute_dsl_runtime.so", "libtvm_ffi.so"} <= needed
    assert "_cudaLaunchKernelEx" in missing and "cuLaunchKernelEx" not in missing
    assert callable(jit_form.load(image, emulated=False))


def test_unplannable_cells_are_refused_at_registration() -> None:
    """A cell that the family cannot plan is a ValueError that names the field, not a surprise at a call."""
    with pytest.raises(ValueError, match="C: expected 64 or 128"):
        jit.register("trimul_mma", [CELL.replace("C64", "C96")])
