"""How long `import kf_runtime` takes beside `import torch`: medians over fresh processes, milliseconds."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

ARMS = {
    "torch": "import torch",
    "torch, kf_runtime and its op": "import torch, kf_runtime; kf_runtime.triangle_multiplicative_update",
}
CODE = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def main() -> None:
    """Print both medians and their difference; the arms alternate."""
    taken: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(9):
        for name, statement in ARMS.items():
            done = subprocess.run(
                [sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True
            )
            taken[name].append(float(done.stdout) * 1e3)
    middle = {name: median(values) for name, values in taken.items()}
    for name, value in middle.items():
        print(f"{name:30} {value:7.1f} ms")
    print(f"added {middle['torch, kf_runtime and its op'] - middle['torch']:.1f} ms")


if __name__ == "__main__":
    main()
