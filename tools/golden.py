"""Golden vectors: write them on the emulator, replay them on a GPU, compare bit for bit.

    python tools/golden.py record OUT [--sm SM] [--cell TEXT]     here, where the store is
    python tools/golden.py replay OUT [--emulated SM]             on a GPU: torch, cuda-bindings and the wheel

`replay` exits 1 unless every launch is right: equal to the bit where integers went in, within the
bound elsewhere; it prints how many elements differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from kf_runtime import driver
from kf_runtime.plan import Plan

from kernel_factory import golden


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sm", default="sm_90a")
    parser.add_argument("--cell", default="/B1.N64.C64.D64/outgoing/mask/")
    parser.add_argument("--emulated", metavar="SM", help="replay on the emulated driver")
    return parser.parse_args()


def record(options: argparse.Namespace) -> int:
    """Write the golden folders of the cells that match."""
    from kernel_factory import pipeline, validate
    from kernel_factory.workspace import find

    selection = pipeline.select(find(), (), (options.sm,), (options.cell,))
    for built in pipeline.built_cells(selection):
        for place in golden.record(selection.workspace.store, built, validate.seed_of(built), options.folder):
            print(place.name)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Launch every golden folder on this process's device."""
    if options.emulated:
        from kernel_factory.emulator import install_driver

        install_driver(options.emulated)
    device = torch.device("cpu" if options.emulated else "cuda")
    print(driver.detect(0).product)
    driver.ensure_context(0)
    found = [launch_once(place.parent, device) for place in sorted(options.folder.glob("*/launch.json"))]
    for one in found:
        verdict = "right" if one.right else "WRONG"
        how = "exact" if one.exact else f"bound {golden.NORM_BAR:g}"
        print(f"{verdict} {one.launch}: {one.different} of {one.elements} elements differ, norm {one.norm:.2e} ({how})")
    return 0 if found and all(one.right for one in found) else 1


def launch_once(place: Path, device: torch.device) -> golden.Difference:
    """One golden launch through the wheel's driver layer."""
    meta = json.loads((place / "launch.json").read_text())
    (launch,) = Plan.from_json(meta["plan"]).launches
    files = {path.stem: path for path in place.glob("*.in")}
    tensors = {
        name: torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.uint8).to(device) for name, p in files.items()
    }
    kernel = driver.get_kernel(driver.load_library((place / "cubin").read_bytes()), launch.symbol)
    function = driver.prepare(kernel, launch.function_attributes, 0)
    images = launch.images_at({name: tensor.data_ptr() for name, tensor in tensors.items()})
    copies = [ctypes.create_string_buffer(image, len(image)) for image in images]
    pointers = (ctypes.c_void_p * len(copies))(*[ctypes.addressof(copy) for copy in copies])
    (status,) = driver.launcher()(driver.launch_config(launch), function, ctypes.addressof(pointers), 0)
    driver.check("cuLaunchKernelEx", status)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return golden.compare(place, tensors[meta["output"]].cpu().numpy().view(np.int16))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


if __name__ == "__main__":
    options = arguments()
    sys.exit(record(options) if options.what == "record" else replay(options))
