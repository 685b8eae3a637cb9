"""The launcher's calls over a real socket, and the file that says where it listens."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from sluice.client.launcher import Launcher, Scaling
from sluice.errors import AccessDeniedError, InvalidRequestError, NotReadyError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name
from sluice.launch.servicer import (
    LAUNCHER_NAME,
    ReplicaScale,
    have_all_left,
    launch_service,
    launcher_of,
)
from sluice.report.summary import remove_end_files
from sluice.rpc.credentials import OPEN, Credentials
from tests.support.certified import SERVICE_TOKEN, bearing
from tests.support.zombie_mark import zombie_mark


class Processes:
    """A reward service and two replicas."""

    def __init__(self) -> None:
        self.names = ["reward", "rollout-0", "rollout-1"]

    def services(self) -> tuple[ServiceState, ...]:
        return tuple(ServiceState(name, None, 0, is_draining=False) for name in self.names)

    def add(self, spec: ServiceSpec) -> None:
        self.names.append(spec.name)

    def dismiss(self, name: str) -> None:
        self.names.remove(name)


async def test_replicas_are_started_and_drained_through_the_address_in_the_runs_folder(
    tmp_path: Path,
) -> None:
    processes = Processes()
    scale = ReplicaScale(processes, lambda number: ServiceSpec(replica_name(number), ("true",)))
    async with launch_service(tmp_path, scale) as found:
        assert launcher_of(tmp_path) == found
        async with Launcher(found.address, found.credentials) as launcher:
            assert await launcher.set_replicas(3) == Scaling(("rollout-2",), ())
            assert [each.name for each in await launcher.services()] == processes.names
            assert processes.names == ["reward", "rollout-0", "rollout-1", "rollout-2"]
            assert await launcher.set_replicas(1) == Scaling((), ("rollout-2", "rollout-1"))
            with pytest.raises(InvalidRequestError, match="0 is below 1"):
                await launcher.set_replicas(0)
    assert processes.names == ["reward", "rollout-0"]
    with pytest.raises(NotReadyError, match="no launcher runs there"):
        launcher_of(tmp_path)


async def test_only_who_can_read_the_runs_folder_as_its_owner_is_let_in(tmp_path: Path) -> None:
    processes = Processes()
    scale = ReplicaScale(processes, lambda number: ServiceSpec(replica_name(number), ("true",)))
    secrets = set()
    for _ in range(2):
        async with launch_service(tmp_path, scale) as found:
            secrets.add(found.secret)
            file = tmp_path / LAUNCHER_NAME
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            for stranger in (OPEN, Credentials(tokens=bearing(SERVICE_TOKEN))):
                async with Launcher(found.address, stranger) as launcher:
                    with pytest.raises(AccessDeniedError):
                        await launcher.set_replicas(1)
            assert found.secret not in repr(found)
    assert len(secrets) == 2
    assert processes.names == ["reward", "rollout-0", "rollout-1"]


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"pid": 7, "address": "h:1"})])
def test_a_file_that_names_no_address_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / LAUNCHER_NAME).write_text(content, encoding="utf-8")
    with pytest.raises(NotReadyError, match="no launcher runs there"):
        launcher_of(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
async def test_a_run_whose_last_process_is_a_zombie_has_left_and_leaves_no_mark_to_the_next(
    tmp_path: Path,
) -> None:
    with zombie_mark(tmp_path, "rollout-0"):
        assert await have_all_left(tmp_path)
        remove_end_files(tmp_path)
    assert not (tmp_path / "processes").exists()
