"""How a trial looks in a terminal, and as an HTML page."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kernel_factory.trial import LaunchTrial


def show(console: Console, title: str, launches: list[LaunchTrial]) -> None:
    """Print a trial."""
    console.print(Text(title, style="bold"))
    for launch in launches:
        _show_launch(console, launch)
    verdict = Text("right", "bold green") if all(launch.right for launch in launches) else Text("WRONG", "bold red")
    console.print(verdict)


def save_html(path: Path, title: str, launches: list[LaunchTrial]) -> None:
    """Write the same as a page of its own."""
    console = Console(record=True, width=140, file=io.StringIO())
    show(console, title, launches)
    console.save_html(str(path))


def _show_launch(console: Console, launch: LaunchTrial) -> None:
    style = "green" if launch.right else "red"
    console.print(Panel(f"{launch.kernel}: {launch.fraction:.0%} of its blocks ran", style=style, expand=False))
    for mode, figures in launch.figures.items():
        norm, row = figures["model_norm"], figures["model_worst_row"]
        console.print(f"  {mode:12} error {norm:.2e}, worst row {row:.2e}, findings {len(launch.findings[mode])}")
    for mode, findings in launch.findings.items():
        for finding in findings[:3]:
            console.print(Text(f"  {mode}: {finding}", style="red"))
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


def _buffers(launch: LaunchTrial) -> Table:
    table = Table("buffer", "way", "sectors", "distinct", "ratio", box=None, pad_edge=True)
    for name, ways in launch.counters["memory"].items():
        for way, count in ways.items():
            ratio = f"{count['sectors'] / max(1, count['unique']):.2f}"
            table.add_row(name, way, str(count["sectors"]), str(count["unique"]), ratio)
    return table


def _lines(launch: LaunchTrial) -> Table:
    table = Table("PTX line", "sectors", "wavefronts", "ideal", "statement", box=None, pad_edge=True)
    for line in launch.lines:
        table.add_row(str(line.number), str(line.sectors), str(line.wavefronts), str(line.ideal), Text(line.text[:80]))
    return table
