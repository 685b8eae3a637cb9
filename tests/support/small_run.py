"""Whole runs in real processes, small enough for a test: tiny model, short answers, few steps.

The reward of an answer is the parity of its checksum, so that about half of them are right
whatever the model says, and most groups are mixed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import yaml

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.config.addresses import peer_address
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.launch.processes.supervisor import RunEnd, Supervisor
from sluice.launch.service_spec import NO_RESTARTS, local_services, rollout_service, with_ports
from sluice.quickstart.arithmetic import TASKS, draw_problem, make_dialogues
from sluice.quickstart.model import MAX_POSITIONS, make_model, save_model
from sluice.quickstart.tokenizer import save_tokenizer, train_tokenizer
from sluice.rpc.client import open_channel
from sluice.rpc.credentials import client_credentials
from tests.support.preloaded import PreloadedHost
from tests.support.prompt_parquet import prompt_rows, write_prompts

GROUPS, SAMPLES, TRAIN_ROWS = 4, 4, 2000
WAIT_S, LAST_LOOKS_S, GRACE_S = 300.0, 120.0, 120.0
ENDLESS = ("trainer.total_training_steps=1000000", "trainer.total_epochs=1000")
"""For a run that its test ends."""
SLOWLY = "reward.custom_reward_function.name=slowly"
"""For a run that trains while its test waits for other processes: it leaves them the cores."""
# A busy machine lets a process stand still for some seconds; here that is no death and no stall.
# What a test kills is noticed without these limits.
_PATIENT = {
    "trainer": {"replica_ttl_s": 60.0, "replica_stall_s": 120.0},
    "reward": {"stall_timeout_s": 120.0, "slow_factor": None},
    "weights": {"timeout_s": 60.0, "probe_timeout_s": 30.0},
    "shutdown_grace_s": GRACE_S,
}

SCORER = """
import time
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": right, "acc": right}

def slowly(*args, **kwargs):
    time.sleep(0.03)
    return compute_score(*args, **kwargs)

def always_right(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1.0, "acc": 1.0}
"""


@dataclass(frozen=True, slots=True)
class Assets:
    """Files that all runs share. `config` is complete but for the run's folder."""

    folder: Path
    config: Path


def make_assets(folder: Path) -> Assets:
    """Model with random weights, tokenizer, data, scorer and configuration; a few seconds."""
    rng, task = random.Random(0), TASKS["quickstart"]
    problems = [draw_problem(rng, task) for _ in range(100)]
    tokenizer = train_tokenizer(make_dialogues(problems, rng, wrong_step_rate=0.1))
    model = folder / "model"
    save_model(make_model(tokenizer, seed=0), model)
    save_tokenizer(tokenizer, model, MAX_POSITIONS)
    questions = [f"{number} + 1 = ?" for number in range(TRAIN_ROWS)]
    write_prompts(folder / "train.parquet", prompt_rows(questions))
    write_prompts(folder / "val.parquet", prompt_rows(questions[:4]))
    (folder / "scorer.py").write_text(SCORER, encoding="utf-8")
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(_tree(folder)), encoding="utf-8")
    return Assets(folder, config)


def _tree(folder: Path) -> dict[str, Any]:
    return {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": GROUPS,
            "max_prompt_length": 64,
            "max_response_length": 8,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {
                "ppo_mini_batch_size": GROUPS // 2,
                "ppo_micro_batch_size_per_gpu": 8,
                "optim": {"lr": 1e-3},
                "fsdp_config": {"dtype": "float32"},
            },
            "rollout": {"n": SAMPLES, "max_num_seqs": 32, "dtype": "float32"},
        },
        "algorithm": {
            "filter_groups": {"enable": True, "metric": "acc"},
            "rollout_correction": {"rollout_is": "token"},
        },
        "reward": {
            "custom_reward_function": {"path": str(folder / "scorer.py")},
            "scorer_pool": {"num_workers": 1, "timeout_s": 120.0},
        },
        "trainer": {
            "total_training_steps": 4,
            "val_before_train": False,
            "resume_mode": "disable",
            "logger": ["jsonl"],
            "device": "cpu",
        },
        "sluice": {"asynchrony": {"max_staleness": 1}, **_PATIENT},
    }


@dataclass(frozen=True, slots=True)
class Record:
    """What a run left behind."""

    end: RunEnd
    run_dir: Path
    lines: tuple[tuple[str, str], ...]
    left_running: tuple[int, ...]

    @property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of all steps."""
        return [row for row in self._rows() if "training/global_step" in row]

    @property
    def accounts(self) -> dict[str, float]:
        """How prompts ended."""
        text = (self.run_dir / "accounts.json").read_text(encoding="utf-8")
        return dict(json.loads(text))

    def log(self, name: str) -> str:
        """All lines of one process."""
        return "\n".join(line for process, line in self.lines if process == name)

    def checkpoint(self, step: int) -> Path:
        """Folder of a checkpoint."""
        return self.run_dir / "checkpoints" / f"global_step_{step}"

    def data(self, step: int) -> dict[str, Any]:
        """A checkpoint's data progress."""
        return dict(json.loads((self.checkpoint(step) / "data.json").read_text(encoding="utf-8")))

    def _rows(self) -> list[dict[str, float]]:
        text = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


class LiveRun:
    """A run under way: its processes and its trainer's calls."""

    def __init__(self, config: RunConfig, config_file: Path, supervisor: Supervisor) -> None:
        self.config, self._config_file, self._supervisor = config, config_file, supervisor
        self._channels = {
            # Not gRPC's own channel, which after failures waits ever longer to connect.
            name: open_channel(
                peer_address(service.endpoint, name),
                max_message_bytes=1 << 20,
                credentials=client_credentials(config.sluice.security),
            )
            for name, service in (
                ("trainer", config.sluice.trainer),
                ("reward", config.sluice.reward),
            )
        }
        self.trainer: Any = trainer_pb2_grpc.TrainerServiceStub(self._channels["trainer"])
        self.reward: Any = reward_pb2_grpc.RewardServiceStub(self._channels["reward"])
        self._extra: list[Supervisor] = []

    def channel(self, service: str) -> grpc.aio.Channel:
        """To the trainer or the reward service."""
        return self._channels[service]

    @property
    def run_dir(self) -> Path:
        """Where it writes."""
        return Path(self.config.sluice.run_dir)

    def pid_of(self, name: str) -> int:
        """The process id of a running service."""
        pid = self._supervisor.pid_of(name)
        assert pid is not None, f"{name} is not running"
        return pid

    def send(self, name: str, number: signal.Signals) -> None:
        """Signals one process."""
        os.kill(self.pid_of(name), number)

    def new_replica(self, index: int) -> Supervisor:
        """A supervisor of one more replica, not started yet."""
        spec = replace(rollout_service(self.config, self._config_file, index), restarts=NO_RESTARTS)
        logs = self._config_file.parent / "logs"
        return Supervisor([spec], logs, lambda *_: None, GRACE_S, PreloadedHost())

    async def status(self) -> trainer_pb2.GetStatusResponse:
        """The trainer's status."""
        return await self.trainer.GetStatus(trainer_pb2.GetStatusRequest(), timeout=60)

    async def reward_status(self) -> reward_pb2.GetStatusResponse:
        """The reward service's status."""
        return await self.reward.GetStatus(reward_pb2.GetStatusRequest(), timeout=60)

    async def serving(self) -> dict[str, str]:
        """Instance by name of the replicas that serve."""
        replicas = (await self.status()).replicas
        return {r.replica.name: r.replica.instance_id for r in replicas if r.state == "serving"}

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Polls `condition`; an unreachable service counts as not yet."""
        ends_s = time.monotonic() + WAIT_S
        while True:
            try:
                if await condition():
                    return
            except grpc.aio.AioRpcError as error:
                what = f"{what} ({error.details()})"[:300]
            assert time.monotonic() < ends_s, f"within {WAIT_S} s not: {what}"
            await asyncio.sleep(0.05)

    async def until_step(self, step: int) -> None:
        """Waits for finished steps."""

        async def reached() -> bool:
            return (await self.status()).step >= step

        await self.until(reached, f"step {step}")

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()


Scenario = Callable[[LiveRun], Awaitable[None]]


async def _nothing(_run: LiveRun) -> None:
    """A run that is left alone."""


def run_to_end(
    assets: Assets, run_dir: Path, overrides: Sequence[str] = (), scenario: Scenario = _nothing
) -> Record:
    """Starts all processes, lets `scenario` act on them, and returns when all have ended."""
    config = load_config(assets.config, [f"sluice.run_dir={run_dir}", *overrides])
    check_config(config)
    return asyncio.run(_run(with_ports(config), run_dir, scenario))


async def _run(config: RunConfig, run_dir: Path, scenario: Scenario) -> Record:
    config_file = run_dir / "config.yaml"
    write_config(config, config_file)
    lines: list[tuple[str, str]] = []
    pids: set[int] = set()
    specs = local_services(config, config_file)
    supervisor = Supervisor(
        specs,
        run_dir / "logs",
        lambda name, line: lines.append((name, line)),
        GRACE_S + 30.0,
        PreloadedHost(),
    )
    run = LiveRun(config, config_file, supervisor)
    try:
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(supervisor.run(), name="supervisor")
            watching = tasks.create_task(_note_pids(supervisor, [s.name for s in specs], pids))
            acting = tasks.create_task(scenario(run), name="scenario")
            end = await ending
            watching.cancel()
            await asyncio.wait([acting], timeout=LAST_LOOKS_S)
            if not acting.done():
                raise AssertionError(f"the run ended before all was seen: {end}")
    finally:
        await run.close()
    return Record(end, run_dir, tuple(lines), tuple(pid for pid in pids if is_running(pid)))


async def _note_pids(supervisor: Supervisor, names: Sequence[str], pids: set[int]) -> None:
    while True:
        pids.update(pid for name in names if (pid := supervisor.pid_of(name)) is not None)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def extra_replica(run: LiveRun, index: int) -> AsyncIterator[Supervisor]:
    """One more replica, from outside the run's own supervisor, for the length of the block."""
    supervisor = run.new_replica(index)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(), name="replica")
        try:
            yield supervisor
        finally:
            running.cancel()


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def processes_naming(run_dir: Path) -> list[str]:
    """Command lines of all processes that mention a run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(run_dir) in line:
            found.append(line)
    return found
