"""What launchers on several hosts tell each other in the run's folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from sluice.launch.network_layout import KINDS, SERVICE_PORTS, network_settings
from sluice.launch.shared_run import RunEnding, SharedRun
from sluice.service_contract import TRACKER_NAME


def saved(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    fresh = folder / "fresh"
    fresh.write_text(str(step), encoding="ascii")
    fresh.replace(folder / TRACKER_NAME)


def test_a_run_that_continues_keeps_its_beginning_and_its_counts(tmp_path: Path) -> None:
    run, checkpoints = SharedRun(tmp_path), tmp_path / "checkpoints"
    run.begin(checkpoints)
    mark = run.checkpoints_before()
    assert [run.count_start("reward") for _ in range(3)] == [0, 1, 2]
    saved(checkpoints, 5)
    assert run.is_active
    assert run.checkpoints_before() == mark
    assert run.count_start("reward") == 3
    assert run.count_start("trainer") == 0


@pytest.mark.parametrize("failures", [(), ("reward ended with code 1",)])
def test_a_run_that_has_ended_or_failed_begins_again(
    tmp_path: Path, failures: tuple[str, ...]
) -> None:
    run, checkpoints = SharedRun(tmp_path), tmp_path / "checkpoints"
    run.begin(checkpoints)
    mark = run.checkpoints_before()
    run.count_start("reward")
    saved(checkpoints, 5)
    run.end(RunEnding("reward", failures))
    assert not run.is_active
    run.begin(checkpoints)
    assert run.ending() is None
    assert run.checkpoints_before() != mark
    assert run.count_start("reward") == 0


def test_how_a_run_ended_first_is_what_counts(tmp_path: Path) -> None:
    run = SharedRun(tmp_path)
    run.begin(tmp_path)
    assert run.ending() is None
    run.end(RunEnding("reward", ("no memory",)))
    run.end(RunEnding("trainer", ()))
    assert run.ending() == RunEnding("reward", ("no memory",))
    assert not RunEnding("reward", ("no memory",)).is_complete
    assert RunEnding("trainer", ()).is_complete


def stale(*_: object, **__: object) -> str:
    """Reads as a network file system does whose server was there a moment ago."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_volume_that_fails_for_a_moment_is_no_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SharedRun(tmp_path)
    run.begin(tmp_path)
    monkeypatch.setattr(Path, "read_text", stale)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        run.checkpoints_before()


def test_a_folder_in_which_no_run_began_is_reported_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sluice prepare"):
        SharedRun(tmp_path).checkpoints_before()


def test_services_are_found_by_their_names_at_ports_of_their_own() -> None:
    service = load_config(None, [*network_settings()]).sluice
    for kind in KINDS:
        endpoint = getattr(service, kind).endpoint
        assert (endpoint.advertise, endpoint.port) == (kind, SERVICE_PORTS[kind].port)
        assert endpoint.health_port == SERVICE_PORTS[kind].health_port
    assert service.rollout.replicas == 0
