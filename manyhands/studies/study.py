"""What a study is, what it finds, and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Points = list[list[float]]


@dataclass(frozen=True)
class Finding:
    x: str
    y: str
    series: dict[str, Points]
    kind: Literal["lines", "bars"] = "lines"
    """bars: each series is one bar for each label; its points are (number of the label, height), stacked."""
    labels: list[str] = field(default_factory=list)
    log: str = ""
    """Axes that are logarithmic: x, y, xy."""
    level: float | None = None
    """A horizontal line to compare with."""
    note: str = ""


@dataclass(frozen=True)
class Desk:
    """Where a study works: quick versions take a minute or so on two cores."""

    folder: Path
    quick: bool
    say: Callable[[str], None]


@dataclass(frozen=True)
class Study:
    paper: str
    about: str
    find: Callable[[Desk], Finding]


def save(name: str, study: Study, finding: Finding, desk: Desk, machine: dict[str, Any]) -> tuple[Path, Path]:
    """study.json and study.png in the study's folder."""
    about = {"study": name, "paper": study.paper, "about": study.about, "quick": desk.quick, "machine": machine}
    told, picture = desk.folder / "study.json", desk.folder / "study.png"
    told.write_text(json.dumps({**about, **asdict(finding)}, indent=1))
    draw(f"{name}: {study.about}", finding, picture)
    return told, picture


def draw(title: str, finding: Finding, out: Path) -> None:
    import textwrap

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    if finding.kind == "bars":
        below = [0.0] * len(finding.labels)
        for label, points in finding.series.items():
            heights = [height for _, height in points]
            axes.bar(range(len(heights)), heights, bottom=below, label=label, width=0.6)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_xticks(range(len(finding.labels)), finding.labels)
    else:
        styles, colours = _styles(list(finding.series))
        for label, points in finding.series.items():
            marker = "o" if len(points) <= 12 else None
            look: dict[str, Any] = {"linestyle": styles[label], "color": colours[label], "marker": marker}
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.4, markersize=4, **look)
    if finding.level is not None:
        axes.axhline(finding.level, color="black", linewidth=0.8, linestyle="--")
    for axis in finding.log:
        getattr(axes, f"set_{axis}scale")("log")
    measured = sorted({x for points in finding.series.values() for x, _ in points})
    if "x" in finding.log and len(measured) <= 12:
        axes.set_xticks(measured, [f"{x:,g}" for x in measured])
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    if "y" not in finding.log and all(y >= 0 for points in finding.series.values() for _, y in points):
        axes.set_ylim(bottom=0)
    axes.set_xlabel(finding.x)
    axes.set_ylabel(finding.y)
    axes.set_title("\n".join(textwrap.wrap(title, 90)), fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(finding.series) > 6:
        figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    else:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _styles(labels: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Labels like "gradient, layer 1": the first word is told by the line's style, the second by its colour."""
    parts = [label.split(", ", 1) if len(labels) > 6 else ["", label] for label in labels]
    firsts, seconds = (list(dict.fromkeys(part[i] for part in parts if len(part) > i)) for i in (0, 1))
    lines = ["-", "--", ":", "-."]
    styles = {label: lines[firsts.index(part[0]) % 4] for label, part in zip(labels, parts, strict=True)}
    colours = {}
    for label, part in zip(labels, parts, strict=True):
        colours[label] = f"C{seconds.index(part[1]) % 10}" if len(part) > 1 else "C0"
    return styles, colours
