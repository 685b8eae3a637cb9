"""deploy/ray: what the scripts ask of Ray, with a stand-in for it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.source_tree import ROOT

SCRIPTS = ROOT / "deploy" / "ray"
HEAD, WORKER = "127.0.0.1", "127.0.0.2"
# Says what it was called with, and by which interfaces.
RAY = """#!/usr/bin/env bash
echo "ray $* [$HCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME]" >> "$CALLS"
"""
PYTHON = """#!/usr/bin/env bash
case $1 in
    */node_network.py) echo "$NETWORK" ;;
    */wait_for_cluster.py) echo "wait ${*:2}" >> "$CALLS" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Machine:
    """One on which the scripts find a Ray and a Python of ours."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        for name, text in (("ray", RAY), ("python", PYTHON)):
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        self._folder = folder

    def run(
        self, script: str, *words: str, address: str = HEAD, **variables: str
    ) -> tuple[int, list[str], str]:
        own = {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "NETWORK": f"{HEAD} {address} eth7",
            "REAL_PYTHON": sys.executable,
        }
        done = subprocess.run(
            [str(SCRIPTS / script), *words],
            env={**own, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        calls = self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []
        return done.returncode, calls, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_head_waits_for_all_devices_runs_the_command_and_takes_the_cluster_down(
    machine: Machine,
) -> None:
    command = ("sh", "-c", 'echo "run at $RAY_ADDRESS" >> "$CALLS"; exit 3')
    code, calls, _ = machine.run(
        "start_node.sh", "node-0", "--", *command,
        NODES="4", DEVICE="NPU", DEVICES_PER_NODE="8", PORT="7777", RESOURCES='{"big": 1}',
    )  # fmt: skip
    assert code == 3
    assert calls == [
        f"ray start --head --port=7777 --node-ip-address={HEAD} "
        '--resources={"big": 1, "NPU": 8} [eth7 eth7 eth7]',
        f"wait --address {HEAD}:7777 --timeout 600 --nodes 4 --resource NPU=32",
        f"run at {HEAD}:7777",
        "ray stop --grace-period 30 [eth7 eth7 eth7]",
    ]


def test_gpus_are_rays_own_resource_and_interfaces_set_by_hand_stay(machine: Machine) -> None:
    _, calls, _ = machine.run(
        "start_node.sh", "node-0", "--", "true",
        DEVICE="GPU", DEVICES_PER_NODE="2", HCCL_SOCKET_IFNAME="bond0", RAY_OPTIONS="--a=1 --b",
    )  # fmt: skip
    assert calls[0] == (
        f"ray start --head --port=6379 --node-ip-address={HEAD} --num-gpus=2 --resources={{}} "
        "--a=1 --b [bond0 eth7 eth7]"
    )
    assert calls[1].endswith("--nodes 1 --resource GPU=2")


def test_another_machine_joins_once_the_head_answers_and_stays_until_it_is_gone(
    machine: Machine,
) -> None:
    with socket.create_server((HEAD, 0)) as head:
        port = head.getsockname()[1]
        code, calls, _ = machine.run(
            "start_node.sh", "node-0", "--", "false", address=WORKER, PORT=str(port)
        )
    assert code == 0
    assert calls == [
        f"ray start --address={HEAD}:{port} --node-ip-address={WORKER} --resources={{}} --block "
        "[eth7 eth7 eth7]"
    ]


def test_a_head_that_never_answers_is_named(machine: Machine) -> None:
    with socket.create_server((HEAD, 0)) as gone:
        port = gone.getsockname()[1]
    code, calls, said = machine.run(
        "start_node.sh", "node-0", address=WORKER, PORT=str(port), JOIN_TIMEOUT_S="0"
    )
    assert (code, calls) == (1, [])
    assert f"{HEAD}:{port}: no head answers" in said


@pytest.mark.parametrize("words", [(), ("--help",), ("node-0", "sluice")])
def test_a_wrong_call_shows_how_it_is_called(machine: Machine, words: tuple[str, ...]) -> None:
    code, calls, said = machine.run("start_node.sh", *words)
    assert (code, calls) == (2, [])
    assert "deploy/ray/start_node.sh HEAD -- sluice up run.yaml --on ray" in said
    assert "PYTHON" in said
    assert "set -euo" not in said


def test_a_job_runs_the_command_on_the_head_with_its_resources_and_variables(
    machine: Machine,
) -> None:
    code, calls, _ = machine.run(
        "submit_job.sh", "run.yaml", "a.b=1",
        RESOURCES="rollout=NPU:8 reward=CPU:2", ENVIRONMENT='{"X": "1"}',
    )  # fmt: skip
    assert code == 0
    (call,) = calls
    before, _, command = call.partition(" -- ")
    assert command.startswith(
        "sluice up run.yaml a.b=1 --on ray --resources rollout=NPU:8 --resources reward=CPU:2"
    )
    given = before.partition("--runtime-env-json ")[2]
    assert json.loads(given) == {"env_vars": {"X": "1"}}


def test_a_cluster_is_complete_with_all_nodes_and_devices_and_dead_nodes_do_not_count() -> None:
    missing = module("wait_for_cluster").missing

    def node(address: str, *, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": alive}

    nodes = [node("10.0.0.2"), node("10.0.0.1"), node("10.0.0.3", alive=False)]
    assert missing(nodes, {"NPU": 16.0}, 2, {"NPU": 16.0}) == []
    assert missing(nodes, {"NPU": 8.0}, 3, {"NPU": 24.0, "big": 1.0}) == [
        "nodes: 2 of 3 (10.0.0.1, 10.0.0.2)",
        "NPU: 8 of 24",
        "big: 0 of 1",
    ]


def test_a_machine_finds_the_network_that_leads_to_the_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = module("node_network")
    network.main(HEAD)
    network.main(HEAD, "lo")
    assert capsys.readouterr().out == f"{HEAD} {HEAD} lo\n" * 2
    with pytest.raises(SystemExit, match="INTERFACE=nope7: it has no IPv4 address"):
        network.main(HEAD, "nope7")
