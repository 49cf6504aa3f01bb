"""Fences, and instructions that steer resources and grids.

PTX ISA 9.7.13.5 (membar, fence, the proxy fences), 9.7.19.5 (setmaxnreg), 9.7.13.13 (griddepcontrol). Memory is
sequentially consistent here, so a fence changes no value; what a missing one would break is the race checker's work.
"""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..ptx.records import Immediate, Instruction
from ..registry import emits, runtime

_SPACES = ("global", "shared::cta", "shared::cluster")


@emits("fence.proxy.async", *(f"fence.proxy.async.{s}" for s in _SPACES), writes=False)
def proxy_fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """fence.proxy.async{.space}: orders generic and async accesses of the thread."""
    space = ins.modifiers[2] if len(ins.modifiers) > 2 else "all"
    e.line(f"proxy_fenced({e.issue()}, {space!r})")


@runtime
def proxy_fenced(issue: Issue, space: str) -> None:
    M = issue.M
    if M.race and space != "global":
        M.race.proxy_fence(issue.threads)
    if M.race and space in ("all", "global") and M.global_race.proxies is not None:
        M.global_race.proxies.fence(issue.threads)


@emits("fence.mbarrier_init.release.cluster", writes=False)
def init_fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """fence.mbarrier_init.release.cluster: makes the thread's mbarrier.init visible to the cluster."""
    e.line(f"inits_fenced({e.issue()})")


@runtime
def inits_fenced(issue: Issue) -> None:
    if issue.M.race:
        issue.M.race.init_fence(issue.threads)


@emits("fence.proxy.tensormap::generic", "fence.proxy.alias", "fence.proxy.async::generic", writes=False)
def other_proxies(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Fences of the tensor-map and alias proxies, and the one-way fences of the async proxy."""
    if ins.modifiers[1] == "async::generic":
        mods.take("acquire", "release")
        mods.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        mods.take("cluster")
        e.line(f"proxy_fenced({e.issue()}, 'all')")
        return
    mods.take("acquire", "release")
    mods.take("cta", "cluster", "gpu", "sys")


@emits("fence", "membar", writes=False)
def fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """fence{.sc,.acq_rel,.acquire,.release}.scope and membar."""
    order = mods.take("sc", "acq_rel", "acquire", "release")
    mods.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    scope = mods.take("cta", "cluster", "gpu", "sys", "gl")
    e.operands(0)
    e.line(f"fenced({e.issue()}, {scope!r}, {order != 'release'}, {order != 'acquire'})")


@runtime
def fenced(issue: Issue, scope: str, acquires: bool, releases: bool) -> None:
    race, threads = issue.M.race, issue.threads
    if not race or not threads.size:
        return
    if acquires:
        race.acquire_fence(threads)
    if releases:
        race.release_fence(threads)
    issue.M.global_race.fence(threads, scope, acquires, releases)


@emits("setmaxnreg.inc", "setmaxnreg.dec", writes=False)
def register_budget(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """setmaxnreg: registers a warp may use; a multiple of 8 from 24 to 256."""
    for name in ("sync", "aligned", "u32"):
        mods.one(name)
    (count,) = e.operands(1)
    if not isinstance(count, Immediate) or count.value % 8 or not 24 <= count.value <= 256:
        raise e.fail("setmaxnreg takes a constant multiple of 8 from 24 to 256")


@emits("griddepcontrol.launch_dependents", "griddepcontrol.wait", writes=False)
def dependent_grids(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """griddepcontrol: launches are emulated one after another, so there is nothing to wait for."""
    e.operands(0)


@emits("createpolicy")
def cache_policy(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """createpolicy: an opaque cache policy; there is no cache here."""
    mods.left.clear()
    e.set(ins.operands[0], e.constant(np.uint64(0)), "u64")
