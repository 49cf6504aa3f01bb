"""``run``: one launch of one kernel, batch by batch, in one of three modes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .clusters import ClusterShape
from .counters import Counters, Counting
from .errors import Fault, Finding, LaunchError
from .machine import Machine
from .memory import HostMemory, Memory
from .module import Kernel
from .races import GlobalRaces, SharedRaces, UnsetRegisters
from .shadow import shadow_bytes

MODES = ("lockstep", "warp-serial", "race")
# Threads in a batch, measured best on GEMMs (1 core, NumPy 2.4): small enough that registers stay in cache.
BATCH_THREADS = {"lockstep": 16384, "warp-serial": 65536, "race": 16384}
SHADOW_BYTES = 1 << 29  # of the race checker's shared-memory shadow in a batch


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Grid, block and cluster in (x, y, z), dynamic shared memory in bytes, one bytes object a parameter.

    ``shared_limit`` is the opt-in limit of the device in bytes (None: not checked). ``resident_ctas`` is how many
    CTAs the device holds at once, for kernels whose CTAs wait for one another (None: the whole grid).
    ``block_limit`` is how many basic blocks a batch executes before a loop counts as endless (a ``runaway`` finding).
    ``by_the_manual`` holds tcgen05 to the letter of the PTX manual where CUTLASS relies on less (see tensor_core).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int = 0
    params: tuple[bytes, ...] = ()
    shared_limit: int | None = 232448
    block_limit: int = 50_000_000
    cluster: tuple[int, int, int] = (1, 1, 1)
    resident_ctas: int | None = None
    by_the_manual: bool = False

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(grid=self.grid, cluster=self.cluster)

    @property
    def threads(self) -> int:
        return int(np.prod(self.block))

    @property
    def ctas(self) -> int:
        return int(np.prod(self.grid))

    def packed_params(self, kernel: object) -> bytes:
        """The parameters at their offsets; raises LaunchError when number or sizes differ from the kernel's."""
        want = [p.size for p in kernel.params]
        have = [len(p) for p in self.params]
        if want != have:
            raise LaunchError(
                f"kernel {kernel.name} takes parameters of {want} bytes, the launch gives {have}; "
                "pack them as the kernel declares"
            )
        end = max((p.offset + p.size for p in kernel.params), default=0)
        out = bytearray(end)
        for param, data in zip(kernel.params, self.params, strict=True):
            out[param.offset : param.offset + param.size] = data
        return bytes(out)

    def check(self, kernel: Kernel) -> None:
        """Raise LaunchError for a launch that no device would take."""
        if len(self.grid) != 3 or len(self.block) != 3 or min(*self.grid, *self.block) < 1:
            raise LaunchError(f"grid {self.grid} and block {self.block} must be three positive numbers each")
        if self.threads % 32 or self.threads > 1024:
            raise LaunchError(f"block of {self.threads} threads; the emulator takes multiples of 32 up to 1024")
        if kernel.required_threads and tuple(kernel.required_threads) != tuple(self.block):
            raise LaunchError(
                f"kernel {kernel.name} requires blocks of {kernel.required_threads} threads, "
                f"the launch has {self.block}"
            )
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)) or not 1 <= self.shape.size <= 16:
            raise LaunchError(f"cluster {self.cluster} must divide grid {self.grid} and have at most 16 CTAs")
        required = kernel.program.kernel.required_cluster
        if required and tuple(required) != tuple(self.cluster):
            raise LaunchError(f"kernel {kernel.name} requires clusters of {required}, the launch has {self.cluster}")
        total = kernel.static_shared + self.dynamic_shared
        if self.shared_limit is not None and total > self.shared_limit:
            raise LaunchError(
                f"{total} bytes of shared memory, the limit is {self.shared_limit}; use fewer stages or smaller tiles"
            )
        self.packed_params(kernel.program.kernel)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found and counted; ``seconds`` is wall time, ``thread_instructions`` counts guarded-off ones too.

    ``complete``: every thread ran to its end; where a fault stopped the run, it may not have met everything.
    """

    findings: tuple[Finding, ...]
    counters: Counters
    thread_instructions: int
    seconds: float
    mode: str = "lockstep"
    ctas: int = 0
    complete: bool = True

    @property
    def ok(self) -> bool:
        return not self.findings


def run(
    kernel: Kernel,
    config: LaunchConfig,
    memory: Memory | HostMemory,
    mode: str = "lockstep",
    seed: int = 0,
    ctas: Sequence[int] | None = None,
    counters: bool = True,
) -> Result:
    """Run a launch (or only the CTAs with linear numbers ``ctas``) and report findings and counts.

    lockstep: all threads together. warp-serial: each warp as far as it can go, in an order drawn from ``seed``.
    race: lockstep with happens-before checks of shared memory and between CTAs. In all of them cp.async data lands
    at the wait that covers it. A fault stops the run and is a finding; LaunchError is for input that cannot run.
    """
    if mode not in MODES:
        raise LaunchError(f"mode {mode!r}; expected one of {', '.join(MODES)}")
    config.check(kernel)
    chosen = range(config.ctas) if ctas is None else sorted(set(ctas))
    if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < config.ctas:
        raise LaunchError(f"CTA numbers {chosen[0]}..{chosen[-1]} of a grid of {config.ctas}")
    return _Run(kernel, config, memory, mode, seed, counters).all(config.shape.whole(chosen))


class _Run:
    def __init__(
        self, kernel: Kernel, config: LaunchConfig, memory: object, mode: str, seed: int, counters: bool
    ) -> None:
        self.kernel, self.config, self.memory, self.mode = kernel, config, memory, mode
        self.rng = np.random.default_rng([seed, MODES.index(mode)])
        self.count = Counting(kernel) if counters else None
        self.findings: list[Finding] = []
        self.executed = 0
        self.complete = True
        self.global_races = GlobalRaces(kernel.program) if mode == "race" else None

    def all(self, chosen: Sequence[int]) -> Result:
        started = time.perf_counter()
        self._launch(chosen)
        for name in self.memory.broken_red_zones():
            self.findings.append(
                Finding(
                    kind="red-zone",
                    kernel=self.kernel.name,
                    cta=-1,
                    warp=-1,
                    lane=-1,
                    line=0,
                    text="",
                    message=f"the red zone of buffer {name!r} was overwritten",
                    cure="an emulator fault: bounds checks let a write through; report it",
                )
            )
        counters = self.count.result() if self.count else Counters.empty(self.kernel.name)
        return Result(
            findings=tuple(self.findings),
            counters=counters,
            thread_instructions=self.executed,
            seconds=time.perf_counter() - started,
            mode=self.mode,
            ctas=len(chosen),
            complete=self.complete,
        )

    def _launch(self, chosen: np.ndarray) -> None:
        """Run the CTAs batch by batch. Batches that wait for other CTAs stay resident and take turns."""
        size = max(1, BATCH_THREADS[self.mode] // self.config.threads)
        if self.mode == "race":
            size = max(1, min(size, SHADOW_BYTES // shadow_bytes(self.kernel.program, self.config)))
        cluster = self.config.shape.size
        size = max(cluster, size // cluster * cluster)
        room = self.config.resident_ctas or len(chosen)
        resident: list[Machine] = []
        at = 0
        while at < len(chosen) or resident:
            held = sum(m.cta_count for m in resident)
            if at < len(chosen) and held < room:
                count = max(cluster, min(size, room - held) // cluster * cluster)
                machine = self._machine(chosen[at : at + count])
                at += count
                outcome = self._step(machine)
                if outcome is None:
                    return
                resident += [] if outcome else [machine]
            else:
                before = [m.events for m in resident]
                for machine in list(resident):
                    outcome = self._step(machine)
                    if outcome is None:
                        return
                    if outcome:
                        resident.remove(machine)
                if resident and [m.events for m in resident] == before:
                    self._stuck(resident[0], len(chosen), room)
                    return

    def _machine(self, ctas: np.ndarray) -> Machine:
        machine = Machine(
            self.kernel.program,
            self.config,
            self.memory,
            ctas,
            warp_groups=self.mode == "warp-serial",
            rng=self.rng,
        )
        machine.count = self.count
        if self.mode == "race":
            machine.race, machine.global_race = SharedRaces(machine), self.global_races
            machine.unset = UnsetRegisters(machine) if self.kernel.program.maybe_unset else None
        return machine

    def _step(self, machine: Machine) -> bool | None:
        """Run a batch: True when it is done, False when it waits for CTAs of other batches, None after a fault."""
        if self.global_races:
            self.global_races.machine = machine
        fault, done = None, False
        try:
            done = machine.run()
        except Fault as found:
            fault = found
        if done or fault is not None:
            self._collect(machine, fault)
        return None if fault is not None else done

    def _collect(self, machine: Machine, fault: Fault | None) -> None:
        blocks = self.kernel.program.blocks
        self.executed += int(sum(n * b.size for n, b in zip(machine.executed.tolist(), blocks, strict=True)))
        reports = machine.reports()
        if machine.race:
            reports += [*machine.race.reports(fault is None), *self.global_races.take()]
            reports += machine.unset.reports() if machine.unset else []
        self.findings += [self._finding(machine, r, count) for r, count in reports]
        if fault is not None:
            self.complete = False
            self.findings.append(self._finding(machine, fault, 1))

    def _stuck(self, machine: Machine, ctas: int, room: int) -> None:
        """Every resident CTA polls memory that none of them will change."""
        thread = int(np.argmax(machine.state == 0))
        here = machine.parts[0].pc if machine.parts[0].pc is not None else int(machine.pc[thread])
        lines = machine.program.blocks[here].lines
        message = f"all {room} resident CTAs of {ctas} poll memory that nobody changes"
        if room < ctas:
            message += "; the others cannot start before these leave"
        self._collect(machine, Fault(
            "deadlock", lines[0].line if lines else 0, message,
            "launch no more CTAs than the device holds at once, and let every CTA arrive at the grid barrier", thread,
        ))  # fmt: skip

    def _finding(self, machine: Machine, fault: Fault, count: int) -> Finding:
        thread = min(fault.thread, machine.T - 1)
        return Finding(
            kind=fault.kind,
            kernel=self.kernel.name,
            cta=int(machine.ctas[machine.cta[thread]]),
            warp=int(machine.warp[thread]),
            lane=thread & 31,
            line=fault.line,
            text=self.kernel.program.instruction_at(fault.line),
            other_line=fault.other_line,
            message=fault.message,
            cure=fault.cure,
            count=count,
        )
