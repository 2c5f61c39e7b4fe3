"""Learning curves: one line per recipe, the mean over its seeds, with their spread. And how stale gradients were."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from manyhands.run import Run
from manyhands.types import UsageError

COUNTS = "staleness_counts"


def plot(runs: list[Run], out: Path, x: Literal["step", "time_s", "frames"] = "step", y: str = "return_mean") -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--out {out}: the name must end in .png, .svg or .pdf")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no folder {out.parent}")
    rows = {run: [row for row in run.metrics() if row.get(y) is not None] for run in runs}
    for run in runs:
        if not rows[run]:
            known = sorted(set().union(*run.metrics()) if run.metrics() else [])
            raise UsageError(
                f"{run.directory} has no values of {y!r} yet" + (f" (there are: {', '.join(known)})" if known else "")
            )
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if y == COUNTS:
        _draw_counts(axes, rows)
    else:
        _draw_curves(axes, rows, x, y)
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out


def _draw_curves(axes: Any, rows: dict[Run, list[dict[str, Any]]], x: str, y: str) -> None:
    curves: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for run, told in rows.items():
        curves[run.recipe.name].append((np.array([r[x] for r in told], float), np.array([r[y] for r in told], float)))
    for name, seeds in sorted(curves.items()):
        # Seeds report at slightly different steps: compare them where all of them have been.
        grid = np.linspace(max(xs[0] for xs, _ in seeds), min(xs[-1] for xs, _ in seeds), 200)
        values = np.stack([np.interp(grid, xs, ys) for xs, ys in seeds])
        label = name if len(seeds) == 1 else f"{name} ({len(seeds)} seeds)"
        (line,) = axes.plot(grid, values.mean(0), label=label, linewidth=1.8)
        if len(seeds) > 1:
            axes.fill_between(grid, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel({"step": "steps", "time_s": "seconds", "frames": "frames"}[x])
    axes.set_ylabel({"return_mean": "return (mean of the last episodes)"}.get(y, y.replace("_", " ")))


def _draw_counts(axes: Any, rows: dict[Run, list[dict[str, Any]]]) -> None:
    """The share of gradients that found so many updates of others since their parameters were read."""
    totals: dict[str, Counter[int]] = defaultdict(Counter)
    for run, told in rows.items():
        for row in told:
            totals[run.recipe.name].update({int(k): n for k, n in row[COUNTS].items()})
    for name, counts in sorted(totals.items()):
        every = sum(counts.values())
        shown = sorted(counts)
        mean = sum(k * n for k, n in counts.items()) / every
        label = f"{name}: mean {mean:.1f}, at most {max(shown)}"
        axes.plot(shown, [counts[k] / every for k in shown], marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set_xscale("symlog")
    axes.set_xlabel("staleness (updates of others since the parameters were read)")
    axes.set_ylabel("share of gradients")


def bars(result: dict[str, Any], out: Path) -> Path:
    """What `manyhands bench` found: the three rates, and where the time of training went."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {
        "training": "steps_per_s",
        "sampling only": "sampling_only_steps_per_s",
        "simulators only": "simulator_only_steps_per_s",
    }
    figure, (rates, split) = plt.subplots(2, 1, figsize=(7, 3.6), layout="constrained", height_ratios=(3, 1.4))
    drawn = rates.barh(list(names), [result[key] for key in names.values()], color="#4878a8")
    rates.bar_label(drawn, labels=[f"{result[key]:,.0f}" for key in names.values()], padding=3)
    rates.margins(x=0.15)
    rates.invert_yaxis()
    rates.set_title(result["recipe"])
    rates.set_xlabel("steps per second")
    left = 0.0
    for name, share in result["time"].items():
        split.barh(0, share, left=left, label=f"{name} {share:.0%}")
        left += share
    split.set_xlim(0, max(left, 1.0))
    split.set_yticks([])
    split.set_xlabel("share of the time of training")
    split.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize="small")
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out
