"""Parameter servers: what a push and pull costs, against model size, servers and learners, on both hosts.

Constant gradients, float32; no snapshots are taken here. push+pull: a gradient goes out and the newest parameters are back in
the model; update: the server's own part of it (latency in the paper); comms: the rest. The plot has the paper's three lines
against the number of parameters; its third one, the gradient, is a batch of 32 through a network of that size. copy: a plain
copy of as many numbers in the same minute, before and after; on a shared machine it tells how busy the memory is.

    python benchmarks/parameter_server.py [--json] [--hosts process ray ray-far] [--rule adam] [--plot lines.png] [--quick]
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from script import run

from manyhands import machine
from manyhands.config import Recipe, TopologyConfig
from manyhands.hosts.door import new_name
from manyhands.hosts.process import ProcessHost
from manyhands.keeper import Keeper
from manyhands.nets.flat import Model
from manyhands.plan.meetings import Pusher
from manyhands.stores.rules import AdaGrad, Adam, RMSProp
from manyhands.stores.servers import ServersConfig
from manyhands.studies.rates import gradient_s
from manyhands.types import EnvSpec

RULES: dict[str, Any] = {
    "rmsprop": RMSProp(learning_rate=1e-6, decay=0.9, epsilon=1e-8, epsilon_inside=True),  # Downpour
    "adagrad": AdaGrad(learning_rate=1e-6),  # Gorila
    "adam": Adam(learning_rate=1e-6, beta1=0.8, beta2=0.75, epsilon=1e-8),  # distributed BA3C
}
NATURE = 1_687_719  # parameters, with six actions
SIZES = (100_000, 400_000, NATURE, 5_000_000, 15_000_000, 30_000_000)


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    hosts: tuple[Literal["process", "ray", "ray-far"], ...] = ("process", "ray", "ray-far")
    """Where the servers run. ray-far: as between machines, where parameters travel through Ray itself."""
    pushes: int = 60
    """Of each learner and setting; the median is told."""
    rule: Literal["rmsprop", "adagrad", "adam"] = "rmsprop"
    """What the servers apply: as in Downpour, in Gorila, or in distributed BA3C."""
    plot: str = ""
    """Also draw the three lines against model size into this PNG."""
    quick: bool = False
    """Only the nature network, one server, one learner."""
    sizes: tuple[int, ...] = field(default=SIZES)
    """Numbers of parameters."""


def copy_ms(size: int, times: int = 20) -> float:
    source, target, seconds = torch.ones(size), torch.zeros(size), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(times):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return 1e3 * statistics.median(seconds)


def measure(host_name: str, size: int, shards: int, learners: int, pushes: int, rule: str) -> dict[str, Any]:
    where: Any = host_name.split("-")[0]
    recipe = Recipe(
        rule=RULES[rule], store=ServersConfig(shards=shards, snapshot_s=2.0), topology=TopologyConfig(learners, host=where)
    )
    host: Any = ProcessHost()
    if host_name.startswith("ray"):
        from manyhands.cluster.host import RayHost

        host = RayHost("", learners, new_name(), shortcut=host_name == "ray")
    spec = EnvSpec("none", (1,), "float32", 1, 1)
    model = Model(torch.nn.Module(), torch.zeros(size), torch.zeros(size))
    keeper = Keeper(host, recipe, model, spec, print, None)
    pushers = [host.start(Pusher, recipe, size, rank, keeper.at, name=f"learner {rank}") for rank in range(learners)]
    copies = [copy_ms(size)]
    try:
        told = [call.result() for call in [pusher.call("push", pushes, timeout_s=300) for pusher in pushers]]
    finally:
        for pusher in pushers:
            pusher.close(time.monotonic())
        keeper.close()
        host.close()
    copies.append(copy_ms(size))
    means = {name: statistics.mean(row[name] for row in told) for name in ("push_pull_ms", "update_ms", "comms_ms")}
    return {
        "host": host_name, "parameters": size, "servers": shards, "learners": learners,
        **{name: round(value, 3) for name, value in means.items()},
        "copy_ms": round(statistics.mean(copies), 3),
        "updates_per_s": round(sum(row["rate"] for row in told), 1),
    }  # fmt: skip


def settings(options: Options) -> list[tuple[int, int, int]]:
    """Parameters, servers, learners."""
    if options.quick:
        return [(NATURE, 1, 1)]
    by_size = [(size, 1, 1) for size in options.sizes]
    return [*by_size, (NATURE, 2, 1), (NATURE, 4, 1), (NATURE, 1, 2), (NATURE, 1, 4)]


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for host, style in (("process", "-"), ("ray", "--"), ("ray-far", ":")):
        mine = [row for row in rows if row["host"] == host and row["servers"] == row["learners"] == 1]
        for name, colour in (("comms_ms", "tab:blue"), ("update_ms", "tab:green")):
            label = {"comms_ms": "comms (there and back)", "update_ms": "latency (the server's update)"}[name]
            if mine:
                axes.plot([r["parameters"] for r in mine], [r[name] for r in mine], style, color=colour, marker="o",
                          label=f"{label}, {host}")  # fmt: skip
    sizes = sorted({row["parameters"] for row in rows if row["servers"] == row["learners"] == 1})
    axes.plot(sizes, [1e3 * gradient_s(size) for size in sizes], color="tab:red", marker="o", label="gradient (batch of 32)")
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="milliseconds")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(options: Options) -> None:
    rows = []
    if not options.json:
        print(f"{'host':<8} {'parameters':>11} servers learners  push+pull     comms    update      copy   updates/s")
    for host in options.hosts:
        for size, shards, learners in settings(options):
            row = measure(host, size, shards, learners, max(options.pushes * NATURE // max(size, NATURE), 8), options.rule)
            rows.append(row)
            if not options.json:
                print(
                    f"{host:<8} {size:>11,} {shards:>7} {learners:>8} {row['push_pull_ms']:>7.2f} ms {row['comms_ms']:>6.2f} ms "
                    f"{row['update_ms']:>6.2f} ms {row['copy_ms']:>6.2f} ms {row['updates_per_s']:>11,.1f}",
                    flush=True,
                )
    if options.plot:
        draw(rows, options.plot)
    described = machine.describe()
    if options.json:
        print(json.dumps({"rows": rows, "machine": described}))
    else:
        print(f"on {described['cpu']}, {described['cores']} cores, torch {described['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
