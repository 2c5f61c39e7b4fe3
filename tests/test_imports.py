"""Who may import whom: the shape that keeps algorithms ignorant of processes, and everything testable alone."""

import ast
from pathlib import Path

import manyhands

ROOT = Path(manyhands.__file__).parent
MAY = {
    "types": set(),
    "machine": set(),
    "graphs": set(),
    "maths": {"types", "maths"},
    "nets": {"types", "machine", "nets"},
    "hosts": {"types", "machine", "hosts"},
    "algos": {"types", "maths", "nets", "algos"},
    "envs": {"types", "machine", "graphs", "maths", "hosts", "envs"},
    "scores": set(),
    "samplers": {"types", "graphs", "maths", "envs", "samplers"},
    "memory": {"types", "graphs", "maths", "hosts", "memory"},
    "cluster": {"types", "machine", "hosts", "cluster"},
    "stores": {"types", "graphs", "machine", "maths", "nets", "hosts", "stores"},
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("manyhands."))


def test_parts_import_only_what_they_may():
    for part, allowed in MAY.items():
        files = [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else list((ROOT / part).glob("*.py"))
        assert files, part
        for file in files:
            assert set(imports(file)) <= allowed, f"{file.relative_to(ROOT)} imports {set(imports(file)) - allowed}"


def test_only_the_cluster_knows_ray():
    who = [file.parent.name for file in ROOT.rglob("*.py") if "import ray" in file.read_text() or "from ray" in file.read_text()]
    assert set(who) == {"cluster"}


def test_worker_processes_do_not_pay_for_torch():
    import subprocess
    import sys

    code = "import manyhands.envs.workers, manyhands.envs.gym, manyhands.hosts.child, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
