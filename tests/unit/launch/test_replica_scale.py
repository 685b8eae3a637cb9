"""How many replicas a launcher starts or drains, and which."""

from __future__ import annotations

import os
import subprocess
import sys
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, InvalidRequestError
from sluice.launch import servicer
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name
from sluice.launch.servicer import ReplicaScale, ScaleChange, scale_change

NUMBERS = st.sets(st.integers(0, 40), max_size=12)


class Processes:
    """Keeps names instead of processes."""

    def __init__(self, *names: str) -> None:
        self.draining: dict[str, bool] = dict.fromkeys(names, False)

    def services(self) -> tuple[ServiceState, ...]:
        return tuple(ServiceState(name, os.getpid(), 0, d) for name, d in self.draining.items())

    def add(self, spec: ServiceSpec) -> None:
        self.draining[spec.name] = False

    def dismiss(self, name: str) -> None:
        self.draining[name] = True


def make_replica(number: int) -> ServiceSpec:
    return ServiceSpec(replica_name(number), ("true",))


@given(serving=NUMBERS, draining=NUMBERS, wanted=st.integers(1, 20))
def test_as_many_are_left_as_were_asked_for_and_no_number_is_given_twice(
    serving: set[int], draining: set[int], wanted: int
) -> None:
    draining -= serving
    change = scale_change(sorted(serving), sorted(draining), wanted)
    left = (serving | set(change.start)) - set(change.drain)
    assert len(left) == wanted
    assert not set(change.start) & (serving | draining)
    assert set(change.drain) <= serving
    assert not (change.start and change.drain)


@given(serving=NUMBERS, wanted=st.integers(1, 20))
def test_the_highest_numbers_leave_and_the_lowest_free_ones_are_started(
    serving: set[int], wanted: int
) -> None:
    change = scale_change(sorted(serving), (), wanted)
    left = serving - set(change.drain)
    assert list(change.drain) == sorted(change.drain, reverse=True)
    assert not change.drain or min(change.drain) > max(left, default=-1)
    free = [number for number in range(100) if number not in serving]
    assert list(change.start) == free[: len(change.start)]


def test_only_replicas_are_counted_and_asking_again_changes_nothing() -> None:
    processes = Processes("reward", "trainer", "trainer-1", "rollout-0")
    scale = ReplicaScale(processes, make_replica)
    assert scale.set(3) == ScaleChange((1, 2), ())
    assert scale.set(3) == ScaleChange((), ())
    assert scale.set(1) == ScaleChange((), (2, 1))
    assert scale.set(2) == ScaleChange((3,), ())  # 1 and 2 still drain
    kept = {name for name, draining in processes.draining.items() if not draining}
    assert kept == {"reward", "trainer", "trainer-1", "rollout-0", "rollout-3"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [(0, "0 is below 1; a run without replicas"), (-1, "-1 is below 1"), (1025, "above 1024")],
)
def test_a_number_that_no_run_can_have_is_refused_with_the_reason(
    wanted: int, message: str
) -> None:
    processes = Processes("rollout-0")
    with pytest.raises(InvalidRequestError, match=message):
        ReplicaScale(processes, make_replica).set(wanted)
    assert processes.draining == {"rollout-0": False}


@pytest.mark.parametrize("names", [("rollout-0",), ()])
def test_no_more_replicas_start_than_this_machine_has_memory_for(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "available_bytes", lambda: 2 << 30)
    monkeypatch.setattr(servicer, "_memory_of", lambda pid: (1 << 29) if pid == os.getpid() else 0)
    processes = Processes(*names)
    scale = ReplicaScale(processes, make_replica, is_local=True)
    if names:
        with pytest.raises(
            InvalidRequestError,
            match=r"199 more .* 99\.5 GiB.* 2\.0 GiB free; start at most 4 more",
        ):
            scale.set(200)
        assert [*processes.draining] == ["rollout-0"]
    assert len(scale.set(5).start) == 5 - len(names)
    elsewhere = ReplicaScale(processes, make_replica)
    assert len(elsewhere.set(200).start) == 195


HOLDS = "import sys; held = b'1' * (32 << 20); print(flush=True); sys.stdin.read()"
BOTH = (
    f"import subprocess, sys; held = b'1' * (32 << 20); "
    f"subprocess.run([sys.executable, '-c', {HOLDS!r}])"
)


def test_the_memory_of_a_process_is_its_own_and_that_of_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BOTH], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # both hold theirs
        found = servicer._memory_of(process.pid)
        process.stdin.close()
    assert 64 << 20 < found < 128 << 20
    assert servicer._memory_of(process.pid) == 0  # it has ended


def test_replicas_that_would_share_a_port_are_refused() -> None:
    scale = ReplicaScale(Processes("rollout-0"), make_replica, has_fixed_port=True)
    assert scale.set(1) == ScaleChange((), ())
    with pytest.raises(InvalidRequestError, match=r"sluice\.rollout\.endpoint\.port=0"):
        scale.set(2)


def test_if_there_is_no_device_for_one_of_the_new_replicas_none_of_them_starts() -> None:
    def make_some(number: int) -> ServiceSpec:
        if number > 1:
            raise ConfigError("no device is left")
        return make_replica(number)

    processes = Processes("rollout-0")
    with pytest.raises(ConfigError, match="no device is left"):
        ReplicaScale(processes, make_some).set(3)
    assert list(processes.draining) == ["rollout-0"]
