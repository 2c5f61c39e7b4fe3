"""Scores of many runs in one table: raw and normalised, each game's published scores beside ours, and what they say together."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.envs.atari import AtariEnv
from manyhands.protocols import HUMAN, PROTOCOLS
from manyhands.scores import aggregate, published
from manyhands.types import UsageError

if TYPE_CHECKING:
    from manyhands.run import Run

PUBLISHED = {"null-op": "null-op", "ba3c": "null-op", "accelerated": "null-op", "sticky": "null-op"}
"""Whose published scores stand beside a protocol's: the tables have two protocols only, and the output says which was taken."""


AGENTS = {"dqn": "DQN", "gorila": "Gorila"}
TOLD = (
    "run",
    "recipe",
    "mean",
    "standard_deviation",
    "episodes",
    "actions",
    "epsilon",
    "checkpoint_step",
    "starts",
)  # of an evaluation


def evaluations(run: Run, protocol: str) -> list[dict[str, Any]]:
    """Of one protocol, the one to be told last: with the actions that the protocol wants, the newest step, the most episodes."""
    own = PROTOCOLS[protocol].actions
    found = [json.loads(path.read_text()) for path in sorted((run.directory / "eval").glob(f"{protocol}-*.json"))]
    return sorted(found, key=lambda e: (e["actions"] == own, e["checkpoint_step"], e["episodes"]))


def table(runs: list[Run], protocol: str = "null-op") -> dict[str, Any]:
    """{"games": {game: …}, "together": …, "protocol": …, "published_protocol": …}. Runs that were not evaluated are an error."""
    games: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if not isinstance(run.recipe.env, AtariEnv):
            raise UsageError(f"{run.directory}: {run.recipe.env.id} is not an Atari game, nothing was published to compare with")
        played = evaluations(run, protocol)
        if not played:
            command = f"manyhands eval {run.directory} --protocol {protocol}"
            raise UsageError(f"{run.directory} has no {protocol} evaluation: {command}")
        game = run.recipe.env.id.removeprefix("ALE/").removesuffix("-v5")
        games.setdefault(game, []).append({"run": str(run.directory), "recipe": run.recipe.name, **played[-1]})
    beside = PUBLISHED.get(protocol, protocol)
    rows = {game: _row(game, played, beside) for game, played in sorted(games.items())}
    known = [row for row in rows.values() if row["published"] is not None]
    together: dict[str, Any] = {}
    if known:
        together["ours"] = aggregate([row["normalised_runs"] for row in known])
        for agent in AGENTS:
            together[agent] = aggregate([[row["published"][f"{agent}_normalised"]] for row in known])
    return {"protocol": protocol, "published_protocol": beside, "games": rows, "together": together}


def _row(game: str, played: list[dict[str, Any]], beside: str) -> dict[str, Any]:
    scores = [evaluation["mean"] for evaluation in played]
    about = published().get((game, beside))
    row: dict[str, Any] = {
        "score": statistics.fmean(scores),
        "standard_deviation": statistics.pstdev(scores),
        "runs": [{name: evaluation[name] for name in TOLD if name in evaluation} for evaluation in played],
        "normalised": None,
        "normalised_runs": [],
        "published": None,
    }
    if about is not None:
        row["normalised_runs"] = [about.to_human(score) for score in scores]
        row["normalised"] = statistics.fmean(row["normalised_runs"])
        row["published"] = {
            **{name: getattr(about, name) for name in ("random", "human", "dqn", "gorila")},
            "dqn_normalised": about.to_human(about.dqn),
            "gorila_normalised": about.to_human(about.gorila),
        }
    return row


def show(result: dict[str, Any]) -> Any:
    """For a terminal."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold", title=f"{result['protocol']} scores", title_justify="left")
    grid.add_column("game")
    for name in ("runs", "score", "% of human", "random", "human", "DQN", "%", "Gorila", "%"):
        grid.add_column(name, justify="right")
    for game, row in result["games"].items():
        spread = f" ± {row['standard_deviation']:,.1f}" if len(row["runs"]) > 1 else ""
        cells = [game, str(len(row["runs"])), f"{row['score']:,.1f}{spread}"]
        if (p := row["published"]) is None:
            cells += ["not published"]
        else:
            raw = {name: f"{p[name]:,.1f}" for name in ("random", "human", "dqn", "gorila")}
            cells += [f"{row['normalised']:,.0f}", raw["random"], raw["human"], raw["dqn"], f"{p['dqn_normalised']:,.0f}"]
            cells += [raw["gorila"], f"{p['gorila_normalised']:,.0f}"]
        grid.add_row(*cells)
    return grid


def show_together(result: dict[str, Any]) -> str:
    """The aggregates over all games that have published scores."""
    if not result["together"]:
        return "none of these games is among the 49 with published scores"
    games = sum(row["published"] is not None for row in result["games"].values())
    lines = [f"over {games} game{'s' * (games > 1)}, in % of a human (95 % of resampled runs):"]
    for name, (value, low, high) in result["together"]["ours"].items():
        others = ", ".join(f"{label} {result['together'][agent][name][0]:,.0f}" for agent, label in AGENTS.items())
        lines.append(f"  {name.replace('_', ' '):<15}{value:>8,.1f}  [{low:,.1f}, {high:,.1f}]   {others}")
    one = all(len(row["runs"]) == 1 for row in result["games"].values())
    lines += ["  one run of each game: nothing is known about the spread"] if one else []
    if result["published_protocol"] != result["protocol"]:
        lines.append(f"  published scores are of the {result['published_protocol']} protocol, ours of {result['protocol']}")
    if result["protocol"] == HUMAN:
        lines.append("  the start states are our own: those of the published scores are not public")
    return "\n".join(lines)


def draw(result: dict[str, Any], out: Path) -> None:
    """Bars of our normalised scores, with the published agents as marks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(game, row) for game, row in result["games"].items() if row["published"] is not None]
    if not rows:
        raise UsageError("none of these games has published scores: there is nothing to draw")
    rows.sort(key=lambda item: item[1]["normalised"])
    figure, axes = plt.subplots(figsize=(7.5, 1.4 + 0.3 * len(rows)))
    places = range(len(rows))
    axes.barh(places, [row["normalised"] for _, row in rows], color="tab:blue", height=0.6, label="ours")
    for agent, mark, colour in zip(AGENTS, "oD", ("tab:orange", "tab:green"), strict=True):
        values = [row["published"][f"{agent}_normalised"] for _, row in rows]
        axes.plot(values, places, mark, color=colour, markersize=5, label=f"{AGENTS[agent]} (published)")
    axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(list(places), [game for game, _ in rows])
    axes.set_xscale("symlog", linthresh=100)
    axes.set_xlabel(f"% of a human ({result['protocol']}); 0: random play")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)
