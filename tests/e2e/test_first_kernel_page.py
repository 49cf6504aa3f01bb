"""docs/first-kernel.md: every command on the page, in order, in a copy of the checkout."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.conftest import ROOT, Checkout

PAGE = Path(ROOT, "docs", "first-kernel.md")


def test_every_command_of_the_page(checkout: Checkout) -> None:
    """Each exits 0, and the last one runs a kernel at one N and plain torch, with the reason, at the other."""
    commands = [line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S) for line in block.splitlines()]
    assert len(commands) >= 8 and all(line.startswith(("kf ", "python ")) for line in commands)
    (checkout.root / "docs").mkdir()
    (checkout.root / "docs" / "first_call.py").write_bytes((ROOT / "docs" / "first_call.py").read_bytes())
    said = ""
    for line in commands:
        tool, *arguments = line.split()
        said = (checkout.kf if tool == "kf" else checkout.python)(*arguments).stdout
    with_kernel = r"N=65: error (\S+)\n +cubin path .*\n +passed: .*\n"
    without = r"N=66: .*\n +generic path .*nearest admitted.*\n.*decided by: shape\n"
    found = re.search(with_kernel + without, said)
    assert found and float(found[1]) < 4e-3, said
    assert said.endswith("kernels ran 1 time\n")
