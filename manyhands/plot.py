"""Learning curves: one line per recipe, the mean over its seeds, with their spread."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Literal

import numpy as np

from manyhands.run import Run
from manyhands.types import UsageError


def plot(runs: list[Run], out: Path, x: Literal["step", "time_s", "frames"] = "step", y: str = "return_mean") -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--out {out}: the name must end in .png, .svg or .pdf")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no folder {out.parent}")
    curves: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for run in runs:
        rows = [row for row in run.metrics() if row.get(y) is not None]
        if not rows:
            known = sorted(set().union(*run.metrics()) if run.metrics() else [])
            raise UsageError(
                f"{run.directory} has no values of {y!r} yet" + (f" (there are: {', '.join(known)})" if known else "")
            )
        curves[run.recipe.name].append((np.array([r[x] for r in rows], float), np.array([r[y] for r in rows], float)))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
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
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out
