"""The published launches on Ray clusters with pretended devices; nothing of them is loaded.

``python -m benchmarks.devices.launches`` in an environment that has Ray, or a part of
`make bench-devices`. Each launch of tests/data/launches starts by `sluice train --on ray` as it
is written, but for paths and loggers, on a cluster with the nodes and devices that it names. All is
sluice's own up to the services, in whose place processes run that report their variables
(`launched_process`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.devices.launched_process import END_NAME, FOLDER_VARIABLE
from benchmarks.parts import Part
from benchmarks.reporting import ROOT, last_json, print_line, print_report
from sluice.config.memory.shape import published_model
from sluice.quickstart.prepare import prepare
from tools.commands import started
from tools.launched_run import SIZES
from tools.phases import tool_parser
from tools.ray_test.cluster import MarkedProcesses, SimulatedCluster

_LAUNCHES = ROOT / "tests" / "data" / "launches"
_STAND_IN = Path(__file__).with_name("launched_process.py")
_VARIABLE = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}
_SERVICES = ("trainer", "reward", "rollout")
_LINE = re.compile(
    r"devices: (\d+) trains?, (\d+) generates? in (\d+) replicas?(?: of (\d+))? \([^\n]*\)"
)
_ADDED = ("trainer.logger=console", "sluice.sampling.train_truncated=true")
"""Other loggers need packages and accounts; top_p below 1 needs the user's consent."""
_LOG, _REPORTS, _SHOWN = "train.log", "reports", 3000
_PLACED_S, _END_S, _POLL_S = 600.0, 60.0, 0.5
_MORE_CPUS = 4
"""Of a node, beside one for each device."""
Report = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launch:
    """A published launch: its file, its model and the nodes that it names."""

    file: Path
    model: str
    kind: str
    nodes: int
    per_node: int


def read_launch(name: str, row: Mapping[str, Any]) -> Launch:
    """Return a launch of `tests/data/launches`; `row`: its devices and model."""
    file = _LAUNCHES / f"{name}.overrides"
    keys = dict(
        line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines() if "=" in line
    )
    nodes, kind = int(keys["trainer.nnodes"]), keys.get("trainer.device", "gpu").upper()
    return Launch(file, row["model"], kind, nodes, row["devices"] // nodes)


def _stand_ins(folder: Path) -> Path:
    found = folder / "stand_ins"
    (found / "services").mkdir(parents=True)
    (found / "services" / "__init__.py").touch()
    for kind in _SERVICES:
        shutil.copy(_STAND_IN, found / "services" / f"{kind}.py")
    return found


def made_for_launches(folder: Path) -> Mapping[str, str]:
    """Make rows and a tokenizer that all launches take, which name files that are not here.

    Returns:
        paths by key of a launch: its data, and a reward function.
    """
    task, sizes = SIZES["tiny"]
    assets = prepare(folder, task=task, seed=0, progress=lambda _: None, settings=sizes)
    reward = folder / "reward_score.py"
    reward.write_text("def compute_score(*_, **__):\n    return 0.0\n", encoding="utf-8")
    return {
        "actor_rollout_ref.model.path": str(assets.model_dir),
        "data.train_files": str(assets.train_file),
        "data.val_files": str(assets.val_file),
        "custom_reward_function.path": str(reward),
    }


def _paths(launch: Launch, folder: Path, made: Mapping[str, str]) -> list[str]:
    """Return overrides for the files that a launch names, and where it writes."""
    model = folder / launch.model
    shutil.copytree(made["actor_rollout_ref.model.path"], model)
    config = json.dumps(published_model(launch.model))
    (model / "config.json").write_text(config, encoding="utf-8")
    paths = {**made, "actor_rollout_ref.model.path": str(model)}
    if "custom_reward_function.path" not in launch.file.read_text(encoding="utf-8"):
        del paths["custom_reward_function.path"]
    paths |= {"sluice.run_dir": str(folder / "run")}
    return [f"{key}={path}" for key, path in paths.items()]


def _training(
    launch: Launch, folder: Path, cluster: SimulatedCluster, made: Mapping[str, str]
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run `sluice train` while the block runs; its output is ``train.log``."""
    command = [sys.executable, "-m", "sluice", "train", str(launch.file)]
    command += [*_paths(launch, folder, made), *_ADDED, "--on", "ray"]
    command += ["--ray-address", cluster.address]
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}
    return started(command, folder / _LOG, environment, ends_within_s=_END_S)


def _until_placed(train: subprocess.Popen[bytes], folder: Path) -> tuple[str, list[Report], str]:
    """Return the line of the split, the reports of as many processes as it says, and a problem."""
    reports, until_s = folder / _REPORTS, time.monotonic() + _PLACED_S
    while True:
        found = split_line((folder / _LOG).read_text("utf-8", "replace"))
        seen = [json.loads(file.read_text("utf-8")) for file in reports.glob("*.json")]
        line = found[0] if found else ""
        if found and len(seen) >= sum(found[1:3]) + 1:
            (reports / END_NAME).touch()
            try:
                code = train.wait(_END_S)
            except subprocess.TimeoutExpired:
                return line, seen, "sluice train does not end with its trainer"
            return line, seen, f"sluice train ended with code {code}" if code else ""
        if train.poll() is not None:
            return line, seen, f"sluice train ended with code {train.returncode} before its run"
        if time.monotonic() > until_s:
            return line, seen, f"{len(seen)} processes have started after {_PLACED_S:g} s"
        time.sleep(_POLL_S)


def split_line(output: str) -> tuple[str, int, int, int] | None:
    """Return a launch's line, its ranks, its replicas and the devices of each replica."""
    matched = _LINE.search(output)
    if matched is None:
        return None
    ranks, _, replicas, each = (int(one or 1) for one in matched.groups())
    return matched[0].strip(), ranks, replicas, each


def misplaced(launch: Launch, line: str, seen: Sequence[Report]) -> list[str]:
    """Return what is wrong with the devices of a launch's processes; `line`: of its split."""
    split = split_line(line)
    if split is None:
        return [f"no split was said: {line!r}"]
    _, ranks, replicas, each = split
    variable, other = (_VARIABLE[kind] for kind in sorted(_VARIABLE, key=launch.kind.__ne__))
    shares: Counter[tuple[str, int]] = Counter()
    used: Counter[tuple[str, str]] = Counter()
    problems = []
    for one in seen:
        devices = [number for number in one[variable].split(",") if number]
        shares[one["kind"], len(devices)] += 1
        used.update((one["node"], number) for number in devices)
        if one[other] or any(int(number) >= launch.per_node for number in devices):
            problems.append(f"{one['kind']} has {variable}={one[variable]}, {other}={one[other]}")
    wanted = Counter({("reward", 0): 1, ("trainer", 1): ranks, ("rollout", each): replicas})
    if shares != wanted:
        problems.append(f"processes with so many devices: {dict(shares)}, wanted {dict(wanted)}")
    if max(used.values()) > 1 or len(used) != launch.nodes * launch.per_node:
        problems.append(f"{len(used)} devices are used, of one by {max(used.values())} processes")
    return problems + _misnumbered([one for one in seen if one["kind"] == "trainer"], ranks)


def _misnumbered(trainers: Sequence[Report], ranks: int) -> list[str]:
    """Return what is wrong with the ranks' numbers: those of a node are neighbours, from 0."""
    by_node: dict[str, list[tuple[int, int]]] = {}
    for one in trainers:
        by_node.setdefault(one["node"], []).append((int(one["RANK"]), int(one["LOCAL_RANK"])))
    numbers = sorted(rank for found in by_node.values() for rank, _ in found)
    if numbers != list(range(ranks)) or {one["WORLD_SIZE"] for one in trainers} != {str(ranks)}:
        return [f"trainer ranks are {numbers}, wanted {ranks}"]
    return [
        f"a node has the ranks and local ranks {sorted(found)}"
        for found in by_node.values()
        if [rank - min(found)[0] for rank, _ in sorted(found)] != [own for _, own in sorted(found)]
    ]


def placed(launch: Launch, folder: Path, made: Mapping[str, str]) -> tuple[str, list[str]]:
    """Place a launch on a cluster of its own; return the line of its split, and what is wrong."""
    (folder / _REPORTS).mkdir(parents=True)
    processes = MarkedProcesses(uuid.uuid4().hex, folder)
    environment = {
        FOLDER_VARIABLE: str(folder / _REPORTS),
        "PYTHONPATH": os.pathsep.join((str(_stand_ins(folder)), str(ROOT))),
        "PYTHONSAFEPATH": "1",  # the working directory holds the real services
        # Else each node starts a process for each of its CPUs, which a launch does not need.
        "RAY_prestart_worker_first_driver": "0",
    }
    node = {"CPU": float(launch.per_node + _MORE_CPUS), launch.kind: float(launch.per_node)}
    cluster = SimulatedCluster(folder / "ray", processes, node, environment)
    try:
        cluster.start_head(serves_jobs=False)
        for number in range(1, launch.nodes):
            cluster.start_worker(f"127.0.0.{number + 1}")
        with _training(launch, folder, cluster, made) as train:
            line, seen, problem = _until_placed(train, folder)
    finally:
        cluster.stop()
    if problem:
        print_line((folder / _LOG).read_text("utf-8", "replace")[-_SHOWN:])
        return line, [problem]
    return line, misplaced(launch, line, seen)


PART = Part(
    lambda parsed: last_json([parsed.ray_python, "-m", "benchmarks.devices.launches"]),
    least={"launches_placed": 7},
    further=("launch_splits",),
    needs="ray_python",
)


def main(arguments: Sequence[str]) -> int:
    """Place the launches; return the exit status."""
    rows = json.loads((_LAUNCHES / "devices.json").read_text(encoding="utf-8"))
    parser = tool_parser(__doc__, "python -m benchmarks.devices.launches")
    parser.add_argument("launches", nargs="*", default=list(rows), help=", ".join(rows))
    splits, good = {}, 0
    # Sockets of Ray are in the folder, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="sll-", dir="/tmp", ignore_cleanup_errors=True) as name:
        made = made_for_launches(Path(name) / "made")
        for number, launch in enumerate(parser.parse_args(arguments).launches):
            began_s = time.monotonic()
            found = read_launch(launch, rows[launch])
            splits[launch], problems = placed(found, Path(name) / str(number), made)
            good += not problems
            wrong = f" WRONG: {'; '.join(problems)}" if problems else ""
            print_line(f"{launch}: {splits[launch]}, {time.monotonic() - began_s:.0f} s{wrong}")
    return print_report({"launches_placed": good, "launch_splits": splits})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
