"""deploy/ray: what the scripts ask of Ray, with a stand-in for it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
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
[ "$1" = start ] || exit 0
[ -z "${BLOCKS:-}" ] || eval "$BLOCKS"
exit "${RAY_CODE:-0}"
"""
SLEEP = """#!/usr/bin/env bash
exec /bin/sleep "${1/#[0-9]*/0.01}"
"""
# Reports that it runs and which signal it was sent, and ends with a code of its own.
LISTENS = """
trap 'echo received TERM >> "$CALLS"; exit 9' TERM
trap 'echo received INT >> "$CALLS"; exit 9' INT
echo listens >> "$CALLS"
while :; do sleep 1; done
"""
WAIT_S = 60
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
        for name, text in (("ray", RAY), ("python", PYTHON), ("sleep", SLEEP)):
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        self._folder = folder

    def run(
        self, script: str, *words: str, address: str = HEAD, **variables: str
    ) -> tuple[int, list[str], str]:
        process = self.start(script, *words, address=address, **variables)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, self.called(), said

    def start(
        self, script: str, *words: str, address: str = HEAD, **variables: str
    ) -> subprocess.Popen[str]:
        own = {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "NETWORK": f"{HEAD} {address} eth7",
            "REAL_PYTHON": sys.executable,
        }
        return subprocess.Popen(
            [str(SCRIPTS / script), *words],
            env={**own, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def called(self) -> list[str]:
        return self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []

    def after_signal(self, process: subprocess.Popen[str], number: signal.Signals) -> int:
        """The exit code of a script that is sent a signal once its command listens."""
        until_s = time.monotonic() + WAIT_S
        while "listens" not in self.called():
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
        return process.returncode


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


def test_a_machine_that_the_head_does_not_take_ends_with_rays_code(machine: Machine) -> None:
    with socket.create_server((HEAD, 0)) as head:
        port = str(head.getsockname()[1])
        code, _, said = machine.run(
            "start_node.sh", "node-0", address=WORKER, PORT=port, RAY_CODE="7"
        )
    assert code == 7
    assert "ray start ended with code 7, and the head" in said


def test_a_machine_whose_head_goes_away_has_done_its_part(machine: Machine) -> None:
    with socket.create_server((HEAD, 0)) as head:
        port = str(head.getsockname()[1])
        process = machine.start("start_node.sh", "node-0", address=WORKER, PORT=port, RAY_CODE="1")
        head.accept()[0].close()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert f"node {WORKER} has left the cluster" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_head_reaches_the_command_whose_code_counts(
    machine: Machine, number: signal.Signals
) -> None:
    process = machine.start("start_node.sh", "node-0", "--", "bash", "-c", LISTENS)
    assert machine.after_signal(process, number) == 9
    assert machine.called()[-2:] == [
        f"received {number.name.removeprefix('SIG')}",
        "ray stop --grace-period 30 [eth7 eth7 eth7]",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_another_machine_takes_it_out_of_the_cluster(
    machine: Machine, number: signal.Signals, code: int
) -> None:
    with socket.create_server((HEAD, 0)) as head:
        port = str(head.getsockname()[1])
        process = machine.start(
            "start_node.sh", "node-0", address=WORKER, PORT=port, BLOCKS=LISTENS
        )
        assert machine.after_signal(process, number) == code
    assert machine.called()[-1] == f"received {number.name.removeprefix('SIG')}"


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
        "submit_job.sh", "run.yaml", "sluice.run_dir=/shared/run",
        RESOURCES="rollout=NPU:8 reward=CPU:2", ENVIRONMENT='{"X": "1"}',
    )  # fmt: skip
    assert code == 0
    (call,) = calls
    before, _, command = call.partition(" -- ")
    assert command.startswith(
        "sluice up run.yaml sluice.run_dir=/shared/run --on ray "
        "--resources rollout=NPU:8 --resources reward=CPU:2"
    )
    given = before.partition("--runtime-env-json ")[2]
    assert json.loads(given) == {"env_vars": {"X": "1"}}


@pytest.mark.parametrize(
    ("written", "words", "is_taken"),
    [
        ("sluice: {run_dir: /shared/run}", (), True),
        ("sluice: {run_dir: runs/run}", (), False),
        ("sluice: {run_dir: runs/run}", ("sluice.run_dir=/shared/run",), True),
        ("sluice: {run_dir: /shared/run}", ("sluice.run_dir=runs/run",), False),
        ("trainer: {nnodes: 1}", (), False),
        ("", (), False),
    ],
)
def test_a_job_whose_results_would_lie_in_rays_copy_of_the_folder_is_refused(
    machine: Machine, tmp_path: Path, written: str, words: tuple[str, ...], is_taken: bool
) -> None:
    (tmp_path / "run.yaml").write_text(written, encoding="utf-8")
    code, calls, said = machine.run("submit_job.sh", "run.yaml", *words, WORKING_DIR=str(tmp_path))
    assert (code, len(calls)) == ((0, 1) if is_taken else (2, 0))
    assert ("give sluice.run_dir=/..., a folder that all nodes share" in said) is not is_taken


def test_a_job_whose_configuration_is_not_here_has_to_name_its_folder(machine: Machine) -> None:
    code, calls, said = machine.run("submit_job.sh", "/no/such/run.yaml")
    assert (code, calls) == (2, [])
    assert "/no/such/run.yaml cannot be read; give sluice.run_dir=/..." in said


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


@pytest.mark.parametrize(
    ("names", "nodes", "addresses"),
    [
        (["10.0.0.5"], 4, ("10.0.0.5", "10.0.0.5")),
        (["127.0.1.1", "10.0.0.5"], 4, ("10.0.0.5", "10.0.0.5")),
        (["10.0.0.9"], 4, ("10.0.0.9", "10.0.0.5")),
        (["10.0.0.9", "10.0.0.5"], 4, ("10.0.0.5", "10.0.0.5")),
        (["127.0.1.1"], 1, (HEAD, HEAD)),
    ],
)
def test_the_head_is_the_machine_that_has_one_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, names: list[str], nodes: int, addresses: tuple[str, str]
) -> None:
    assert network_of("node-0", names, nodes, monkeypatch) == addresses


def test_a_head_whose_name_is_a_loopback_address_is_refused_where_others_are_to_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match=r"node-0: it is 127\.0\.1\.1 here.*give HEAD by its addr"):
        network_of("node-0", ["127.0.1.1"], 2, monkeypatch)


def network_of(
    head: str, names: list[str], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Of a machine at 10.0.0.5, where the head's name leads to these addresses."""
    network = module("node_network")
    own = {"127.0.1.1": HEAD}
    monkeypatch.setattr(network, "own_address", lambda peer: own.get(peer, "10.0.0.5"))
    found = [(None, None, None, "", (name, 0)) for name in names]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: found)
    answer: tuple[str, str] = network.network(head, "", nodes)
    return answer
