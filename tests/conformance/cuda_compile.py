"""CUDA C++ to PTX by the compiler of the pip package nvidia-cuda-nvcc; the machine's own is never used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).parent / "cuda" / "kernels.cu"


def toolkit() -> Path:
    """The folder of the installed package; ImportError if it is missing."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for nvcc in sorted(Path(root).glob("*/bin/nvcc")):
            return nvcc.parent.parent
    raise ImportError("nvidia-cuda-nvcc is not installed")


@lru_cache
def ptx(sm: int) -> str:
    """The PTX of kernels.cu for one SM; RuntimeError with the compiler's log."""
    root = toolkit()
    environment = {**os.environ, "PATH": f"{root / 'bin'}:/usr/bin:/bin"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        command = [
            str(root / "bin" / "nvcc"), "-ptx", f"-arch=sm_{sm}", "-std=c++17", f"-I{root / 'include'}",
            f"-I{root / 'include' / 'cccl'}", str(SOURCE), "-o", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-800:])
        return out.read_text()
