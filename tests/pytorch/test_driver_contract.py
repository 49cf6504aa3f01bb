"""CUDA graphs, devices, threads, forks and failing drivers, on the emulated driver."""

from __future__ import annotations

import pytest

from tests.pytorch.conftest import Emulated


def test_capture_loads_nothing_and_replays_fresh_weights(emulated: Emulated) -> None:
    """While capturing: generic before preload, three recorded launches after it; replay sees an optimizer's step."""
    found = emulated(
        """
        driver, call = start(), named(SMALLEST)
        with torch.no_grad():
            with driver.capture() as early:
                generic = update(**call)
            before = (len(early.launches), driver.loads, driver.capture_violations, kf_runtime.status().generic)
            loaded = kf_runtime.preload(SMALLEST)
            pool, plain = [], torch.Tensor.new_empty  # a graph's memory pool keeps what was allocated while capturing
            torch.Tensor.new_empty = lambda self, *a, **k: pool.append(plain(self, *a, **k)) or pool[-1]
            with driver.capture() as graph:
                out = update(**call)
            torch.Tensor.new_empty = plain
            graph.replay()
            first = relative_error(out, oracle(SMALLEST, call))
            for name in ("p_in_weight", "norm_out_weight"):
                call[name].add_(0.25)
            call["x"].copy_(named(SMALLEST, 12)["x"])
            graph.replay()
            second = relative_error(out, oracle(SMALLEST, call))
        answer(before=before, loaded=[c.key for c in loaded], recorded=len(graph.launches), first=first, second=second,
               violations=driver.capture_violations, generic=relative_error(generic, oracle(SMALLEST, named(SMALLEST))))
        """
    )
    assert found["before"] == [0, 0, 0, {"capturing": 1}]
    assert found["recorded"] == 3 and found["violations"] == 0 and len(found["loaded"]) == 1
    assert found["first"] <= 6e-3 and found["second"] <= 1.3e-2 and found["generic"] <= 2e-2


def test_preload_is_complete_and_says_what_it_cannot_do(emulated: Emulated) -> None:
    """No names: every cell of the device. Unknown cell, other device kind, off, and unloaded kernels are answered."""
    found = emulated(
        """
        driver = start()
        every = kf_runtime.preload()
        loads = driver.loads
        kf_runtime.preload()
        errors = []
        for arguments in (dict(cells=[SMALLEST.on("sm_120a")]), dict(cells=["not a key"]), dict(device="meta")):
            try:
                kf_runtime.preload(*arguments.pop("cells", ()), **arguments)
            except kf_runtime.KfError as error:
                errors.append(f"{type(error).__name__}: {error}")
        again = driver.loads
        start(mode="off")
        answer(every=len(every), loads=loads, again=again, errors=errors, off=len(kf_runtime.preload()))
        """
    )
    assert found["every"] == 3 and found["loads"] == found["again"] > 0 and found["off"] == 0
    assert [e.split(":")[0] for e in found["errors"]] == ["NoKernel", "CellKeyError", "ArgumentError"]


def test_handles_belong_to_a_device_and_its_context(emulated: Emulated) -> None:
    """Two devices: each gets functions of its own, a foreign context refuses them, and the caller's stays current."""
    found = emulated(
        """
        from cuda.bindings import driver as cuda
        from kf_runtime import driver as kf
        from kf_runtime.loader import Loader
        driver = start("stub", devices=2)
        manifest = dispatch.current().manifest()
        plan = manifest.plan_of(manifest.entry(SMALLEST))
        count = (kf.initialise(), kf.device_count())[1]
        functions = [Loader(manifest, dispatch.current().folder, ordinal).functions(plan) for ordinal in (0, 1)]
        current = int(kf.call("cuCtxGetDevice"))
        config = kf.launch_config(plan.launches[0])
        results = []
        for context in (0, 1):
            with kf.in_context(context):
                results.append([int(cuda.cuLaunchKernelEx(config, f[0], 0, 0)[0]) for f in functions])
        distinct = {int(f) for row in functions for f in row}
        systems = [(dispatch.current().system(o).ordinal, dispatch.current().system(o).product) for o in (0, 1)]
        try:
            dispatch.current().system(2)
        except kf_runtime.KfError as error:
            missing = str(error)
        answer(count=count, current=current, results=results, distinct=len(distinct), systems=systems, missing=missing)
        """
    )
    assert found["count"] == 2 and found["current"] == 0 and found["distinct"] == 6
    assert found["results"] == [[0, 400], [400, 0]]
    assert found["systems"] == [[0, "KF Emulated sm_90a"], [1, "KF Emulated sm_90a"]]
    assert "INVALID_DEVICE" in found["missing"]


def test_sixteen_threads_at_once(emulated: Emulated) -> None:
    """Sixteen threads that meet at the first call: one load each, right and bitwise equal answers, exact counts."""
    found = emulated(
        """
        import threading
        driver, calls = start(), [named(SMALLEST, seed) for seed in (1, 2)]
        with torch.no_grad():
            expected = None
            barrier, outputs = threading.Barrier(16), [None] * 16

            def work(i):
                with torch.no_grad():
                    barrier.wait()
                    outputs[i] = update(**calls[i % 2])

            threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
            [t.start() for t in threads], [t.join() for t in threads]
            errors = [relative_error(outputs[i], oracle(SMALLEST, calls[i])) for i in (0, 1)]
            same = all(torch.equal(outputs[i], outputs[i % 2]) for i in range(16))
        status = kf_runtime.status()
        answer(errors=errors, same=same, loads=driver.loads, hits=status.hits, launches=driver.launches)
        """
    )
    assert max(found["errors"]) <= 6e-3 and found["same"]
    assert found["hits"] == 16 and found["launches"] == 48 and found["loads"] <= 3


FORK = """
def child(work):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.wait()
    return text

def run():
    torch.set_num_threads(1)
    with torch.no_grad():
        out = update(**named(SMALLEST))
    return f"{kf_runtime.status().hits} {kf_runtime.status().generic}"
"""


def test_forks(emulated: Emulated) -> None:
    """A fork after import works; a fork after use is an error that says what to do; declined calls go on."""
    found = emulated(
        FORK
        + """
torch.set_num_threads(1)
driver = start("stub")
early = child(run)
with torch.no_grad():
    update(**named(SMALLEST))
late = child(run)

def status():
    return str(kf_runtime.status().hits)

def declined():
    torch.set_num_threads(1)
    with torch.no_grad():
        update(**{k: v.float() if isinstance(v, torch.Tensor) else v for k, v in named(SMALLEST).items()})
    return str(kf_runtime.status().generic)

answer(early=early, late=late, status=child(status), declined=child(declined), grandchild=child(lambda: child(run)))
"""
    )
    assert found["early"] == "1 {}"
    assert found["late"].startswith("ForkedAfterUse") and "spawn" in found["late"]
    assert found["grandchild"].startswith("ForkedAfterUse")
    assert found["status"] == "0" and found["declined"] == "{'dtype': 1}"


CALLS = (
    "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDriverGetVersion", "cuCtxGetCurrent",
    "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuLibraryLoadData", "cuLibraryGetKernel",
    "cuKernelSetAttribute", "cuKernelGetFunction", "cuFuncLoad", "cuFuncIsLoaded", "cuStreamIsCapturing",
)  # fmt: skip


def test_any_driver_call_may_fail(emulated: Emulated) -> None:
    """Every call with several results: before the launch, the generic answer with its reason; a launch raises."""
    found = emulated(
        f"""
        CALLS = {CALLS!r}
        """
        + """
        warnings.simplefilter("ignore")
        driver, call = start("stub"), named(SMALLEST)
        expected = kf_runtime.ops.triangle_multiplicative_update.generic_path(**call)
        rows, driver_launches = [], driver.launches
        with torch.no_grad():
            for name in CALLS:
                for result in (2, 700, 999):
                    from kf_runtime import driver as kf
                    kf._primary_context.cache_clear()
                    from cuda.bindings import driver as cuda
                    cuda.cuCtxSetCurrent(0)
                    start("stub")
                    before = driver.launches
                    with driver.fault(name, result, times=99):
                        try:
                            out = update(**call)
                            good = driver.launches > before or bool(torch.equal(out, expected))
                            kind = next(iter(kf_runtime.status().generic), "hit")
                        except kf_runtime.KfError as error:
                            good, kind = False, f"{type(error).__name__}: {error}"
                    rows.append((name, result, good, kind))
            start("stub")
            update(**call)
            launched = []
            for skip in range(3):
                with driver.fault("cuLaunchKernelEx", 719, skip=skip):
                    try:
                        update(**call)
                    except kf_runtime.KfError as error:
                        launched.append(f"{type(error).__name__}: {error}")
            update(**call)
            cuda.cuCtxSetCurrent(0)
            update(**call)
        answer(rows=rows, launched=launched, hits=kf_runtime.status().hits)
        """
    )
    bad = [row for row in found["rows"] if not row[2]]
    assert bad == []
    reached = {row[0] for row in found["rows"] if row[3] not in ("hit",)}
    assert len(reached) >= 12, sorted(set(CALLS) - reached)
    assert len(found["launched"]) == 3 and all("CUDA_ERROR_LAUNCH_FAILED" in text for text in found["launched"])


@pytest.mark.parametrize("result", [2, 999])
def test_a_kernel_that_does_not_load_is_not_launched(emulated: Emulated, result: int) -> None:
    """cuFuncLoad that fails leaves the call on the generic path, counted, with one warning that names the error."""
    found = emulated(
        f"""
        warnings.simplefilter("always")
        driver, call = start("stub"), named(SMALLEST)
        with torch.no_grad(), driver.fault("cuFuncLoad", {result}, times=9):
            update(**call), update(**call)
        status = kf_runtime.status()
        answer(generic=status.generic, launches=driver.launches, failures=[f.text for f in status.failures])
        """
    )
    assert found["generic"] == {"driver_error": 2} and found["launches"] == 0
    assert "cuFuncLoad" in found["failures"][0] and found["stderr"].count("RuntimeWarning") == 1
