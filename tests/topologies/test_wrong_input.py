"""Topologies that cannot be: one line, exit 2, nothing started."""

import pytest

from manyhands.cli import main

WRONG = {
    "--store.gather 4": "store.gather = 4 exceeds topology.learners = 3",
    "--store.shards 999999999": "is too many for",
    "--topology.actors 2": "on-policy",
    "--topology.address 127.0.0.1:6379": "is for topology.host = 'ray'",
    "--topology.host ray --topology.address 127.0.0.1:1": "no Ray cluster answers there",
    "--topology.host ray --topology.address nowhere": "give HOST:PORT",
    "--store.max-staleness 3": "asynchronous servers",
    "--topology.host raz": "topology.host",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_one_line_and_exit_2(options, tmp_path, capsys):
    if "--topology.host ray " in options:
        pytest.importorskip("ray")
    told = refused(options.split(), tmp_path, capsys)
    assert WRONG[options] in told[-1] and len([line for line in told if line.startswith("manyhands:")]) == 1


def refused(options, tmp_path, capsys) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        main(["train", "ba3c-snake", "--run-dir", str(tmp_path / "run"), *options])
    told = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2, told
    assert not (tmp_path / "run").exists()
    return told


def test_a_cluster_that_is_too_small(cluster, tmp_path, capsys):
    where = ["--topology.host", "ray", "--topology.address", cluster.address, "--topology.learners", "17", "--store.gather", "17"]
    assert "the cluster has 16 CPUs, but 17 learners and actors want one each" in refused(where, tmp_path, capsys)[-1]
