"""A whole run in real processes to fuzz: trainer, reward service, one replica, a tiny model."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sluice.api.rollout.v1 import rollout_pb2
from sluice.config.addresses import peer_address
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.launch.processes.supervisor import Supervisor
from sluice.launch.service_spec import local_services, with_ports
from sluice.quickstart.arithmetic import TASKS, draw_problem, make_dialogues
from sluice.quickstart.model import MAX_POSITIONS, make_model, save_model
from sluice.quickstart.tokenizer import save_tokenizer, train_tokenizer
from sluice.rpc.client import open_channel, rollout_stub
from tools.fuzz.valid_requests import DATA_SOURCE

if TYPE_CHECKING:
    import grpc

PROCESSES = ("trainer", "reward", "rollout-0")
MAX_CLIENT_PENDING = 64
_ROWS, _STEPS, _GRACE_S = 2000, 1_000_000, 20.0


class FuzzedRun:
    """The processes and where they are.

    Args:
        config: with ports.
        supervisor: of the processes.
    """

    def __init__(self, config: RunConfig, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        service = config.sluice
        self._endpoints = {"trainer": service.trainer.endpoint, "reward": service.reward.endpoint}
        self.addresses: dict[str, str] = {
            name: peer_address(endpoint, name) for name, endpoint in self._endpoints.items()
        }
        self.channels: dict[str, grpc.aio.Channel] = {}

    def pid(self, name: str) -> int | None:
        """Return the process id; another one after a restart; ``None``: it is not running."""
        return self._supervisor.pid_of(name)

    def connect(self, replica: str | None = None) -> None:
        """Open channels that are not open; only the trainer knows the replica's address."""
        if replica is not None:
            self.addresses["rollout-0"] = replica
        for name, address in self.addresses.items():
            if name not in self.channels:
                self.channels[name] = open_channel(address, max_message_bytes=1 << 27)

    async def replica_status(self) -> Any:  # noqa: ANN401  the stubs are untyped
        """Return the replica's own status."""
        stub = rollout_stub(self.channels["rollout-0"])
        return await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=20)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            await channel.close()


@asynccontextmanager
async def live_run(
    folder: Path, seed: int, overrides: Sequence[str] = ()
) -> AsyncIterator[FuzzedRun]:
    """Start the processes, which end with the block; logs are in ``<folder>/run/logs``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = with_ports(_config(folder, seed, overrides))
    config_file = folder / "run" / "config.yaml"
    write_config(config, config_file)
    supervisor = Supervisor(
        local_services(config, config_file), folder / "run" / "logs", lambda *_: None, _GRACE_S
    )
    run = FuzzedRun(config, supervisor)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(), name="supervisor")
        try:
            yield run
        finally:
            await run.close()
            running.cancel()


def _config(folder: Path, seed: int, overrides: Sequence[str]) -> RunConfig:
    rng, task = random.Random(seed), TASKS["quickstart"]
    problems = [draw_problem(rng, task) for _ in range(100)]
    tokenizer = train_tokenizer(make_dialogues(problems, rng, wrong_step_rate=0.1))
    model = folder / "model"
    save_model(make_model(tokenizer, seed=0), model)
    save_tokenizer(tokenizer, model, MAX_POSITIONS)
    _write_rows(folder / "train.parquet", _ROWS)
    _write_rows(folder / "val.parquet", 2)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(_tree(folder)), encoding="utf-8")
    config = load_config(file, overrides)
    check_config(config)
    return config


def _write_rows(file: Path, count: int) -> None:
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def _tree(folder: Path) -> dict[str, Any]:
    return {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 8,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 8,
                "fsdp_config": {"dtype": "float32"},
            },
            "rollout": {"n": 2, "max_num_seqs": 32, "dtype": "float32"},
        },
        "algorithm": {
            "filter_groups": {"enable": False},
            "rollout_correction": {"rollout_is": "token"},
        },
        "reward": {"scorer_pool": {"num_workers": 1, "timeout_s": 2.0}},
        "trainer": {
            "total_training_steps": _STEPS,
            "total_epochs": _STEPS,
            "save_freq": -1,
            "test_freq": -1,
            "val_before_train": False,
            "resume_mode": "disable",
            "logger": ["jsonl"],
            "device": "cpu",
        },
        "sluice": {
            "run_dir": str(folder / "run"),
            "asynchrony": {"max_staleness": 1},
            "reward": {"max_client_pending": MAX_CLIENT_PENDING},
            "weights": {"timeout_s": 5.0},
            "log_level": "WARNING",
        },
    }
