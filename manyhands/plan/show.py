"""A prediction for several numbers of learners: computed, told, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.config import Recipe
from manyhands.plan.model import Machines, Measured, Topology, closed_form
from manyhands.plan.simulation import simulate
from manyhands.stores.allreduce import AllReduceConfig
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.servers import ServersConfig
from manyhands.types import UsageError

LARGER = 4  # times as large batches, for comparison


def topology_of(recipe: Recipe, learners: int) -> Topology:
    """The recipe's store with another number of learners; of K of n gradients the share stays the same."""
    store = recipe.store
    if isinstance(store, ServersConfig):
        share = store.gather / max(recipe.topology.learners, 1)
        gather = max(round(share * learners), 1) if store.gather else 0
        return Topology("synchronous" if gather else "asynchronous", learners, store.shards, gather)
    if isinstance(store, SharedConfig):
        return Topology("shared", learners, store.chunks)
    if isinstance(store, AllReduceConfig) or learners > 1:
        return Topology("allreduce" if learners > 1 else "local", learners)
    return Topology("local", learners)


def check_plannable(recipe: Recipe) -> None:
    if recipe.topology.actors:
        raise UsageError("plan knows learners that act themselves: a recipe with topology.actors can't be planned")


def plan(measured: Measured, recipe: Recipe, learners: list[int], machines: Machines, steps: float) -> dict[str, Any]:
    check_plannable(recipe)
    rows, larger = [], measured.with_batches(LARGER)
    for n in learners:
        topology = topology_of(recipe, n)
        formula, played = closed_form(measured, topology, machines), simulate(measured, topology, machines)
        mean = sum(k * share for k, share in played["staleness"].items())
        rows.append({
            "learners": n,
            "machines": machines.number(n),
            "threads": machines.threads(n),
            "formula": formula,
            **played,
            "staleness_mean": mean,
            "bytes_per_machine": (measured.bytes_per_learner + measured.replay_bytes / n) * min(machines.learners_each or n, n),
            "hours": steps / played["steps_per_s"] / 3600,
            "larger_batch_steps_per_s": simulate(larger, topology, machines)["steps_per_s"],
        })  # fmt: skip
    return {
        "recipe": recipe.name,
        "store": topology_of(recipe, max(learners)).store,
        "measured_on": f"{measured.cpu}, {measured.cores} cores",
        "gradient_s": measured.costs[0].gradient_s,
        "gradient_threads": measured.costs[0].threads,
        "simulate_s": measured.costs[0].simulate_s,
        "act_s": measured.costs[0].act_s,
        "rollout_s": measured.costs[0].rollout_s,
        "learn_s": measured.costs[0].gradient_s * measured.updates_per_rollout,
        "steps_per_rollout": measured.steps_per_rollout,
        "gpus": measured.gpus,
        "update_s": measured.update_s,
        "copy_s": measured.copy_s,
        "bend": rows[-1]["formula"]["bend"],
        "larger_batch": {"times": LARGER, "bend": closed_form(larger, topology_of(recipe, max(learners)), machines)["bend"]},
        "steps": steps,
        "rows": rows,
    }


def _parts(result: dict[str, Any]) -> str:
    """What a rollout and its gradients go into, and how fast each part would be by itself."""
    whole = result["rollout_s"] + result["learn_s"]
    told = {"simulating": result["simulate_s"], "acting": result["act_s"], "gradients": result["learn_s"]}
    rates = {name: f"{result['steps_per_rollout'] / s:,.0f} steps/s" for name, s in told.items() if s > 0}
    return ", ".join(f"{name} {told[name] / whole:.0%} (alone {rate})" for name, rate in rates.items())


def show(result: dict[str, Any]) -> str:
    threads = result["gradient_threads"]
    own = "one thread" if threads == 1 else f"{threads} threads"
    lines = [
        f"{result['recipe']} ({result['store']}), measured on {result['measured_on']}: T (a gradient) "
        f"{1e3 * result['gradient_s']:,.1f} ms on {own}, τ (an update) {1e3 * result['update_s']:,.2f} ms, "
        f"the vector from one process to another {1e3 * result['copy_s']:,.2f} ms",
        f"a learner's time: {_parts(result)}",
        "learners  machines    steps/s    formula  updates/s  staleness  late  GiB each  hours  limited by",
    ]
    for row in result["rows"]:
        busiest = row["bottleneck"]
        lines.append(
            f"{row['learners']:>8,}{row['machines']:>10,}{row['steps_per_s']:>11,.0f}{row['formula']['steps_per_s']:>11,.0f}"
            f"{row['updates_per_s']:>11,.1f}{row['staleness_mean']:>11.1f}{row['late']:>6.0%}"
            f"{row['bytes_per_machine'] / 2**30:>10.1f}{row['hours']:>7.2f}  {busiest} ({row['busy'][busiest]:.0%} busy)"
        )
    lines.append(f"hours: for {result['steps']:,.0f} steps")
    if result["store"] == "asynchronous":
        lines.append(f"updates grow with the learners up to about {result['bend']:,.0f} of them")
    spread = {row["learners"]: [k for k, share in row["staleness"].items() if share >= 0.01] for row in result["rows"]}
    if stale := [f"{min(ks)} to {max(ks)} with {n:,}" for n, ks in spread.items() if ks and max(ks) > 0]:
        lines.append(f"staleness, beside rare cases: {', '.join(stale)}")
    larger, last = result["larger_batch"], result["rows"][-1]
    bend = f", and the bend is at {larger['bend']:,.0f}" if result["store"] == "asynchronous" else ""
    rate = f"{last['larger_batch_steps_per_s']:,.0f} steps/s by {last['learners']:,}"
    lines.append(f"with batches {larger['times']} times as large: {rate}{bend}")
    return "\n".join(lines)


def draw(result: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    learners = [row["learners"] for row in rows]
    axes.plot(learners, [row["formula"]["steps_per_s"] for row in rows], "--", color="tab:gray", label="closed form")
    axes.plot(learners, [row["steps_per_s"] for row in rows], "o-", color="tab:blue", label="played through")
    times = result["larger_batch"]["times"]
    larger = [row["larger_batch_steps_per_s"] for row in rows]
    axes.plot(learners, larger, "s-", color="tab:orange", markersize=4, label=f"with batches {times} times as large")
    first = rows[0]["steps_per_s"] / rows[0]["learners"]
    axes.plot(learners, [first * n for n in learners], ":", color="tab:green", label="as many times as there are learners")
    if result["store"] == "asynchronous" and learners[0] <= result["bend"] <= learners[-1]:
        axes.axvline(result["bend"], color="tab:red", linewidth=0.8, label=f"P = T/τ: {result['bend']:,.0f}")
    axes.set(
        xscale="log", yscale="log", xlabel="learners", ylabel="steps per second", title=f"{result['recipe']}, {result['store']}"
    )
    axes.set_xticks(learners, [f"{n:,}" for n in learners])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)
