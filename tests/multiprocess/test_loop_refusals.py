"""Bad input to a whole run: one message with the thing and the remedy, and nothing left running."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.errors import SluiceError
from tests.support.small_run import Assets, processes_naming, run_to_end


@dataclass(frozen=True)
class Refusal:
    """How a run ended."""

    code: int
    output: str
    run_dir: Path

    def names(self, *parts: str) -> None:
        """One clear message with all `parts`; no traceback; no process is left."""
        assert self.code == 1, self.output
        for part in parts:
            assert part in self.output, self.output
        assert "Traceback" not in self.output
        assert processes_naming(self.run_dir) == []


def up(assets: Assets, tmp_path: Path, *overrides: str) -> Refusal:
    run_dir = tmp_path / "run"
    words = ("up", str(assets.config), f"sluice.run_dir={run_dir}", *overrides)
    ended = CliRunner().invoke(commands, words)
    assert isinstance(ended.exception, SluiceError), ended.output
    return Refusal(ended.exit_code, f"{ended.output}{ended.exception}", run_dir)


def ran(assets: Assets, tmp_path: Path, *overrides: str) -> Refusal:
    """As `up`, of a run whose processes have started: in a fraction of its CPU time."""
    record = run_to_end(assets, tmp_path / "run", overrides)
    return Refusal(record.end.exit_code, "\n".join(record.end.failures), record.run_dir)


def test_keys_and_files_are_refused_together_before_any_process_starts(
    small_assets: Assets, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    up(
        small_assets,
        tmp_path,
        "data.train_batch_sizes=4",
        "data.train_files=nowhere.parquet",
        f"actor_rollout_ref.model.path={empty}",
    ).names(
        "data.train_batch_sizes: unknown key; did you mean data.train_batch_size?",
        "data.train_files: no file nowhere.parquet; give the path of a data file",
        f"actor_rollout_ref.model.path = {empty} holds no config.json",
    )
    assert not (tmp_path / "run" / "logs").exists()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use(small_assets: Assets, tmp_path: Path) -> None:
    with taken_port() as port:
        refusal = up(small_assets, tmp_path, f"sluice.reward.endpoint.port={port}")
    refusal.names(
        f"port {port} on 127.0.0.1 is in use; end the process that holds it, or set another port"
    )


def test_no_replica_within_the_deadline(small_assets: Assets, tmp_path: Path) -> None:
    ran(
        small_assets,
        tmp_path,
        "sluice.rollout.replicas=0",
        "sluice.trainer.replica_wait_timeout_s=1",
    ).names(
        "rollout fleet: no answer within 1 s while waiting for 1 replicas to register",
        "start rollout replicas, or raise sluice.trainer.replica_wait_timeout_s",
    )


def test_a_batch_that_cannot_be_filled(small_assets: Assets, tmp_path: Path) -> None:
    ran(
        small_assets,
        tmp_path,
        "reward.custom_reward_function.name=always_right",
        "data.train_max_samples=40",
        "trainer.total_epochs=1",
    ).names(
        "the data set is exhausted with 0 of 4 groups for the next batch",
        "40 filtered_all_right",
        "raise trainer.total_epochs",
    )


def test_a_model_that_replicas_cannot_load(small_assets: Assets, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (small_assets.folder / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text('{"model_type": "nothing"}', encoding="utf-8")
    refusal = ran(small_assets, tmp_path, f"actor_rollout_ref.model.path={broken}")
    refusal.names("actor_rollout_ref.model.path", str(broken))
