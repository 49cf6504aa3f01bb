"""How a trial looks in a terminal, and as an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kernel_factory.emulator import Finding
from kernel_factory.trial import LaunchTrial, Line

SHOWN = 4  # findings a launch
LINES = 8
CONFLICT = 1.15  # wavefronts over ideal from which a line is marked
#: What a cure's PTX is called in the CuTe DSL.
CUTE = {
    "bar.sync": "cute.arch.sync_threads()",
    "bar.warp.sync": "cute.arch.sync_warp()",
    "cp.async.wait_group": "cute.arch.cp_async_wait_group(0)",
    "cp.async.bulk.wait_group": "cute.arch.cp_async_bulk_wait_group(0)",
    "fence.proxy.async": "cute.arch.fence_proxy(...)",
}


def show(console: Console, title: str, launches: list[LaunchTrial]) -> None:
    """Print a trial."""
    console.print(Text(title, style="bold"))
    for launch in launches:
        _show_launch(console, launch)
    console.print(verdict(launches))


def verdict(launches: list[LaunchTrial]) -> Text:
    """The last line: right, right but not admissible, or wrong."""
    if not all(launch.right for launch in launches):
        return Text("WRONG", "bold red")
    if not all(launch.admissible for launch in launches):
        return Text("right, and the policy would reject it", "bold yellow")
    return Text("right", "bold green")


def save_html(path: Path, title: str, launches: list[LaunchTrial]) -> None:
    """Write the same as a page of its own."""
    console = Console(record=True, width=140, file=io.StringIO())
    show(console, title, launches)
    console.save_html(str(path))


def _show_launch(console: Console, launch: LaunchTrial) -> None:
    style = "green" if launch.admissible else "yellow" if launch.right else "red"
    console.print(Panel(f"{launch.kernel}: {launch.fraction:.0%} of its blocks ran", style=style, expand=False))
    for mode, figures in launch.figures.items():
        norm, row = figures["model_norm"], figures["model_worst_row"]
        console.print(f"  {mode:12} error {norm:.2e}, worst row {row:.2e}, findings {len(launch.findings[mode])}")
    for text in (*_findings(launch), *launch.complaints, *_misplaced(launch)):
        console.print(Text(f"  {text}", style="red"))
    for worst in launch.worst[: 1 if launch.right else None]:
        where = ", ".join(map(str, worst.index))
        console.print(f"  farthest: {worst.buffer}[{where}] found {worst.found:.6g}, expected {worst.expected:.6g}")
    console.print(_buffers(launch))
    console.print(_lines(launch))
    facts, fit, time = launch.facts, launch.occupancy, launch.estimate
    shared = facts.static_shared + facts.dynamic_shared
    console.print(
        f"  {facts.registers} registers, {facts.stack_bytes} bytes of stack, {shared} bytes of shared memory, "
        f"{facts.threads} threads; {fit.blocks} blocks an SM ({fit.share:.0%} of its warps), limited by {fit.limit}"
    )
    console.print(
        f"  ESTIMATE on {time.part}: at least {time.microseconds:.1f} us, bound by {time.binding} "
        f"(memory {time.memory_us:.1f}, tensor {time.tensor_us:.1f}, shared {time.shared_us:.1f}, "
        f"issue {time.issue_us:.1f}); no GPU was timed\n"
    )


def _findings(launch: LaunchTrial) -> Iterator[str]:
    """The first finding of each kind, source line and mode; the rest as a count."""
    seen: dict[tuple[str, str, str], tuple[str, Finding]] = {}
    for mode, findings in launch.findings.items():
        for finding in findings:
            key = (finding.kind, _place(launch, finding.line), _place(launch, finding.other_line))
            seen.setdefault(key, (mode, finding))
    for mode, finding in list(seen.values())[:SHOWN]:
        yield _told(launch, mode, finding)
    if len(seen) > SHOWN:
        yield f"and {len(seen) - SHOWN} more places"


def _told(launch: LaunchTrial, mode: str, finding: Finding) -> str:
    against = f", against {_place(launch, finding.other_line)}" if finding.other_line else ""
    names = [f"{ptx} is {name}" for ptx, name in CUTE.items() if _word(ptx).search(finding.cure)]
    return (
        f"{mode}: {finding.kind} at {_place(launch, finding.line)}{against}\n"
        f"    CTA {finding.cta}, warp {finding.warp}, lane {finding.lane}, {finding.count} times: "
        f"{finding.text[:100]}\n"
        f"    {finding.message}\n"
        f"    next: {finding.cure}" + (f" ({'; '.join(names)})" if names else "")
    )


def _word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(text)}(?![\w.])")


def _place(launch: LaunchTrial, line: int) -> str:
    """A PTX line, with the source line that it comes from where that is known."""
    source = launch.sources.get(line)
    return f"{source} (PTX line {line})" if source else f"PTX line {line}"


def _misplaced(launch: LaunchTrial) -> Iterator[str]:
    """Wrong values that no check explains are mostly right values in the wrong place."""
    if launch.accurate or any(launch.findings.values()):
        return
    shared = sorted(line.number for line in launch.lines if line.wavefronts)
    places = dict.fromkeys(launch.sources.get(line, f"PTX line {line}") for line in shared)
    yield (
        "values are wrong, and no order, bound or wait is at fault: they were computed or placed wrongly"
        + (f"; shared memory is accessed at {', '.join(places)}" if places else "")
        + "\n    next: let every access of a tile use one layout and one swizzle, where it is written and where it is "
        "read; then compare the farthest elements below with the formula"
    )


def _buffers(launch: LaunchTrial) -> Table:
    table = Table("buffer", "way", "sectors", "distinct", "ratio", box=None, pad_edge=True)
    for name, ways in launch.counters["memory"].items():
        for way, count in ways.items():
            ratio = f"{count['sectors'] / max(1, count['unique']):.2f}"
            table.add_row(name, way, str(count["sectors"]), str(count["unique"]), ratio)
    return table


def _lines(launch: LaunchTrial) -> Table:
    table = Table("PTX line", "source", "sectors", "wavefronts", "ideal", "statement", box=None, pad_edge=True)
    shown = [line for rank, line in enumerate(launch.lines) if rank < LINES or conflicts(line)]
    for line in shown:
        marked = "red" if conflicts(line) else None
        source = launch.sources.get(line.number, "")
        figures = (str(line.sectors), str(line.wavefronts), str(line.ideal))
        table.add_row(str(line.number), source, *figures, Text(line.text[:70]), style=marked)
    return table


def conflicts(line: Line) -> bool:
    """Whether an access takes more wavefronts than its bytes need."""
    return line.wavefronts > CONFLICT * line.ideal > 0
