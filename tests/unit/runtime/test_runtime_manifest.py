"""The manifest: a round trip, and every way in which it can be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kf_runtime import manifest
from kf_runtime.cell import Cell
from kf_runtime.errors import CellKeyError, ManifestError
from runtime_fakes import SHA, small_manifest, trimul_cell, trimul_plan, write_wheel


def test_round_trip(tmp_path: Path) -> None:
    """What the factory writes is what the runtime reads, and equal manifests are equal bytes."""
    cells = [trimul_cell(N=n, direction=d, biases=b) for n in (8, 9) for d in ("outgoing", "incoming") for b in (0, 1)]
    found = small_manifest(*[Cell(**{**vars(c), "biases": bool(c.biases)}) for c in cells], required_driver=12080)
    assert manifest.load(write_wheel(tmp_path / "data", found)) == found
    assert manifest.to_bytes(manifest.from_bytes(manifest.to_bytes(found))) == manifest.to_bytes(found)


def test_lookup() -> None:
    """An entry is found by its exact cell only; the nearest cell differs least; equal plans are stored once."""
    found = small_manifest(trimul_cell(N=8), trimul_cell(N=64), trimul_cell(N=8, mask=False))
    assert found.entry(trimul_cell(N=9)) is None
    entry = found.entry(trimul_cell(N=64))
    assert entry is not None and found.plan_of(entry) == trimul_plan(trimul_cell(N=64))
    assert found.nearest(trimul_cell(N=60)) == trimul_cell(N=64)
    assert found.nearest(trimul_cell(N=9, mask=False)) == trimul_cell(N=8, mask=False)
    assert found.nearest(trimul_cell(sm="sm_80")) is None
    assert [e.cell.N for e in found.on_sm("sm_90a")] == [8, 8, 64] and found.sms == ("sm_90a",)


@pytest.mark.parametrize("file", [manifest.FILE, manifest.SIDECAR])
@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "truncated"])
def test_damage_is_found_before_parsing(tmp_path: Path, file: str, damage: str) -> None:
    """Any change to either file is a ManifestError with the path and the cure."""
    path = write_wheel(tmp_path / "data", small_manifest()) / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "flipped": bytes([data[0] ^ 1]) + data[1:], "truncated": data[:20]}[damage])
    with pytest.raises(ManifestError, match=r"manifest\.(json|sha256).*reinstall kf-runtime"):
        manifest.load(tmp_path / "data")


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("schema",), 2, "schema: expected 1; found 2"),
        (("entries", trimul_cell().key, "plan"), "0" * 64, "expected a digest"),
        (("entries", trimul_cell().key, "products"), [{"product": "H", "level": "hoped"}], "hoped"),
        (("entries", "nonsense"), {}, "nonsense"),
        (("cubins", SHA, "kernels"), {}, "expected a cubin and symbol"),
        (("cubins", SHA, "surprise"), 1, "surprise"),
        (("plans",), None, "content"),
    ],
)
def test_wrong_content_says_what(path: tuple[str, ...], value: object, what: str) -> None:
    """Another schema, dangling references and unknown records are ManifestErrors that say what is wrong."""
    tree = json.loads(manifest.to_bytes(small_manifest()))
    node = tree
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    with pytest.raises(ManifestError) as caught:
        manifest.from_bytes(json.dumps(tree).encode())
    assert what in str(caught.value)


def test_bytes_that_are_no_json() -> None:
    """Text and JSON that is no object are refused alike."""
    for data in (b"", b"hello", b"[]", b"3", b"\xff\xfe"):
        with pytest.raises(ManifestError):
            manifest.from_bytes(data)


@given(
    st.builds(
        Cell,
        op=st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True),
        phase=st.sampled_from(["inference", "forward", "backward"]),
        dtype=st.sampled_from(["bf16", "f16", "f32"]),
        B=st.integers(1, 99),
        N=st.integers(1, 5000),
        C=st.integers(1, 999),
        D=st.integers(1, 999),
        direction=st.sampled_from(["outgoing", "incoming"]),
        mask=st.booleans(),
        biases=st.booleans(),
        sm=st.sampled_from(["sm_80", "sm_90a", "sm_100f", "sm_120a"]),
    )
)
def test_cell_keys_round_trip(cell: Cell) -> None:
    """A cell parses from its own key, and from no key with something added."""
    assert Cell.parse(cell.key) == cell
    with pytest.raises(CellKeyError):
        Cell.parse(cell.key + "/x")
