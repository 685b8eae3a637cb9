"""The start of rank 0: its port and its checkpoint."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from services.trainer import leader
from services.trainer.learner.checkpoint import CheckpointStore, start_point
from sluice.config.loading.loader import load_config
from sluice.config.schema.trainer import TrainerConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.rpc.ports import bind_socket
from sluice.service_contract import MARK_VARIABLE, RESTARTS_VARIABLE, TRACKER_NAME, checkpoint_mark
from sluice.types import DataProgress
from tests.support.crashing_saver import write_checkpoint

WAIT_S = 60.0
HOST = "127.0.0.1"


def test_a_reserved_port_answers_no_peer_and_is_served_once_it_is_released() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = int(server.getsockname()[1])
    with bind_socket(HOST, port) as reserved:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=30)
        reserved.close()
        with socket.create_server((HOST, port)):
            pass


async def test_a_taken_port_is_found_before_anything_is_awaited_or_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(leader, "_load", lambda *given: loaded.append(given))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = load_config(
            None,
            [
                f"sluice.trainer.endpoint.port={port}",
                "sluice.reward.endpoint.port=1",  # nobody answers there
            ],
        )
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            async with asyncio.timeout(WAIT_S):
                await leader.run_leader(config)
    assert loaded == []


def write_actor(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def save(store: CheckpointStore, step: int) -> None:
    write_checkpoint(store, step, write_actor, DataProgress(step))


def settings(*overrides: str) -> TrainerConfig:
    return load_config(None, overrides).trainer


def environment(folder: Path, restarts: int) -> dict[str, str]:
    return {MARK_VARIABLE: checkpoint_mark(folder), RESTARTS_VARIABLE: str(restarts)}


def begins_at(store: CheckpointStore, given: dict[str, str], *overrides: str) -> int | None:
    """Return the step of the checkpoint."""
    found = start_point(settings(*overrides), store, given)
    return found.step if found else None


def test_the_first_start_does_what_resume_mode_says(store: CheckpointStore, tmp_path: Path) -> None:
    first = environment(tmp_path, 0)
    assert begins_at(store, first) is None
    save(store, 4)
    first = environment(tmp_path, 0)
    assert begins_at(store, first) == 4
    assert begins_at(store, first, "trainer.resume_mode=disable") is None
    assert begins_at(store, {}, "trainer.resume_mode=disable") is None


def test_a_restart_continues_from_the_runs_own_checkpoint_in_every_resume_mode(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 700)
    again = environment(tmp_path, 1)
    save(store, 2)
    path = f"trainer.resume_from_path={tmp_path / 'global_step_700'}"
    for mode in (["auto"], ["disable"], ["resume_path", path]):
        overrides = [f"trainer.resume_mode={mode[0]}", *mode[1:]]
        assert begins_at(store, again, *overrides) == 2


def test_a_restart_before_the_first_save_begins_where_the_run_began(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert begins_at(store, environment(tmp_path, 2)) is None
    save(store, 700)
    again = environment(tmp_path, 1)
    assert begins_at(store, again, "trainer.resume_mode=disable") is None
    assert begins_at(store, again) == 700


def test_a_checkpoint_of_the_same_step_saved_again_counts_as_the_runs_own(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 2)
    again = environment(tmp_path, 1)
    save(store, 2)
    assert begins_at(store, again, "trainer.resume_mode=disable") == 2


def test_an_own_checkpoint_that_is_damaged_is_an_error_and_not_a_start_from_nothing(
    store: CheckpointStore, tmp_path: Path
) -> None:
    again = environment(tmp_path, 1)
    save(store, 2)
    (tmp_path / "global_step_2" / "actor" / "weights").unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        begins_at(store, again)


def test_the_tracker_file_is_the_one_that_checkpoints_replace(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 2)
    assert (tmp_path / TRACKER_NAME).read_text(encoding="ascii") == "2"
