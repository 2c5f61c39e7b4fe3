"""Four raylets on this machine: components on different ones, the same parameters as anywhere else, raylets that are lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from manyhands.stores.rules import Adam
from tests.processes import wait_for

from .test_equivalence import RULES, local
from .test_servers import kept, recipe_of, together

ray = pytest.importorskip("ray")
from manyhands.cluster.host import RayHost  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def joined(cluster, components: int = 1, shortcut: bool = True):
    host = RayHost(cluster.address, components, f"test-{time.monotonic_ns()}", shortcut)
    try:
        yield host
    finally:
        host.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize("mode", [{}, pytest.param({"gather": 1}, marks=SLOW)], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("shortcut", [pytest.param(True, marks=SLOW), False], ids=["door", "ray"])
def test_servers_with_one_learner_equal_the_local_store(cluster, mode, shortcut):
    recipe = recipe_of(RULES["adam"], shards=2, **mode)
    with joined(cluster, shortcut=shortcut) as host, kept(host, recipe) as keeper:
        (parameters,) = together(host, recipe, keeper)
        state = keeper.state()
    assert np.array_equal(parameters, local(RULES["adam"]).numpy())
    assert np.array_equal(state["parameters"].numpy(), parameters)


def test_two_synchronous_learners_equal_one_double_batch(cluster):
    rule = Adam(learning_rate=0.05)
    recipe = recipe_of(rule, learners=2, shards=2, gather=2)
    with joined(cluster, 2) as host, kept(host, recipe) as keeper:
        one, two = together(host, recipe, keeper)
    assert np.array_equal(one, two)
    np.testing.assert_allclose(one, local(rule).numpy(), rtol=2e-5, atol=1e-6)


def test_components_of_a_kind_sit_on_different_raylets(cluster):
    recipe = recipe_of(Adam(), shards=4)
    with joined(cluster) as host, kept(host, recipe) as keeper:
        nodes = {server.handle.where()[0] for server in keeper._servers}
    assert len(nodes) == 4


@pytest.mark.slow
def test_actors_learners_and_servers_of_a_run_sit_on_different_raylets(cluster):
    from manyhands import build
    from manyhands.config import load_recipe
    from manyhands.team import Team

    there = {"host": "ray", "address": cluster.address, "learners": 2, "actors": 2}
    recipe = load_recipe("gorila-global-snake", {"topology": there})
    spec, _ = build.check(recipe, build.Custom())
    team = Team(recipe, build.Custom(), spec, print, None)
    try:
        hands = {seat.number: (seat.learns, team._hands[rank].where()[0]) for rank, seat in team._seats.items()}
        kinds = {
            "learners": [node for learns, node in hands.values() if learns],
            "actors": [node for learns, node in hands.values() if not learns],
            "servers": [server.handle.where()[0] for server in team._central._servers],
            "replays": [replay.handle.where()[0] for replay in team._central._replays],
        }
    finally:
        team.close()
    for kind, nodes in kinds.items():
        assert len(nodes) == len(set(nodes)) == 2, (kind, nodes)
    assert len({node for nodes in kinds.values() for node in nodes}) == 4  # nobody crowds while a raylet has nothing to do


@pytest.mark.slow
def test_a_server_that_is_killed_or_loses_its_raylet_comes_back_from_its_snapshot(cluster):
    recipe, said = recipe_of(Adam(learning_rate=0.01), shards=4, snapshot_s=0.1), []
    with joined(cluster) as host, kept(host, recipe, said.append) as keeper:
        before = keeper.state()["parameters"]
        os.kill(keeper._servers[1].handle.where()[1], signal.SIGKILL)
        wait_for(lambda: keeper.watch() is not None and keeper.replaced == 1, 60)
        nodes = [server.handle.where()[0] for server in keeper._servers]
        victim = next(node for node in cluster.more if node.node_id in nodes)
        cluster.more.remove(victim)
        cluster.remove_node(victim, allow_graceful=False)
        lost = nodes.count(victim.node_id)
        wait_for(lambda: keeper.watch() is not None and keeper.replaced == 1 + lost, 60)
        assert victim.node_id not in {server.handle.where()[0] for server in keeper._servers}
        cluster.more.append(cluster.add_node(**cluster.common))
        assert np.array_equal(keeper.state()["parameters"], before)
    assert len(said) == 1 + lost and all("replaced from its snapshot" in line for line in said)


def test_a_cluster_that_is_too_small_says_what_is_missing(cluster):
    from manyhands.types import UsageError

    with pytest.raises(UsageError, match=r"has 16 CPUs, but 17 learners and actors want one each"):
        RayHost(cluster.address, 17, "too-small")
    assert not ray.is_initialized()


def test_an_address_where_nobody_answers_is_refused_at_once():
    from manyhands.types import UsageError

    begin = time.monotonic()
    with pytest.raises(UsageError, match="no Ray cluster answers there"):
        RayHost("127.0.0.1:1", 1, "nobody")
    assert time.monotonic() - begin < 5
    with pytest.raises(UsageError, match="give HOST:PORT"):
        RayHost("somewhere", 1, "nobody")


@SLOW
def test_a_cluster_with_tokens_lets_in_who_has_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    stranger = {name: value for name, value in known.items() if not name.startswith("RAY_AUTH")}
    options = ["--head", "--block", "--port", port, "--node-ip-address", "127.0.0.1", "--num-cpus", 2]
    options += ["--include-dashboard", "false"]
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # a short name: there will be sockets in it
        command = [Path(sys.executable).parent / "ray", "start", *options, "--temp-dir", folder]
        head = subprocess.Popen([str(word) for word in command], env=known, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
            found = {}
            for who, environment in (("known", known), ("stranger", stranger)):
                words = ["train", "gorila-snake", "--run-dir", tmp_path / who, "--topology.host", "ray"]
                words += ["--topology.address", f"127.0.0.1:{port}", "--total-steps", 3000, "--memory.warmup-steps", 500]
                command = [sys.executable, "-m", "manyhands", *map(str, words)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                found[who] = (done.returncode, done.stderr.splitlines()[-1], (tmp_path / who).exists())
        finally:
            head.terminate()
            head.wait(60)
    assert found["known"][0] == 0 and found["known"][2], found
    assert found["stranger"][0] == 2 and not found["stranger"][2] and "RAY_AUTH_TOKEN" in found["stranger"][1], found


def test_what_a_component_raises_arrives_with_its_traceback(cluster):
    from manyhands.hosts.process import ChildError, ChildLost

    with joined(cluster) as host:
        handle = host.start(Fails, name="fails")
        with pytest.raises(ChildError, match="ZeroDivisionError"):
            handle.call("divide").result()
        os.kill(handle.where()[1], signal.SIGKILL)
        with pytest.raises(ChildLost, match="fails"):
            handle.call("divide", timeout_s=30).result()


class Fails:
    def divide(self) -> float:
        return 1 / 0

    def close(self) -> None:
        pass
