"""How many replicas a launcher keeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.errors import InvalidRequestError, NotFoundError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name

MOST_REPLICAS = 1024
_NAME = re.compile(re.escape(replica_name(0)).replace("0", r"(\d+)"))


def is_replica_name(name: str) -> bool:
    """Return whether a process of a launcher is one of its replicas."""
    return _NAME.fullmatch(name) is not None


def replica_number(name: str) -> int:
    """Return the number of the replica with a name.

    Raises:
        NotFoundError: it is no replica's.
    """
    if (match := _NAME.fullmatch(name)) is None:
        raise NotFoundError(f"{name}: no replica has that name")
    return int(match[1])


class Processes(Protocol):
    """What a supervisor offers; see `Supervisor`."""

    def services(self) -> tuple[ServiceState, ...]:
        """Return all processes."""
        ...

    def add(self, spec: ServiceSpec, /) -> None:
        """Start one more."""
        ...

    def dismiss(self, name: str, /) -> None:
        """Ask one to leave."""
        ...


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """Numbers of replicas to start, and of those to drain, in that order."""

    start: tuple[int, ...]
    drain: tuple[int, ...]


def scale_change(serving: Sequence[int], draining: Sequence[int], wanted: int) -> ScaleChange:
    """Return the change that makes `wanted` replicas of those numbered `serving`.

    The lowest free numbers start, the highest ones drain. The number of a replica that still drains
    is not free: two processes never have one name.
    """
    if wanted >= len(serving):
        taken = {*serving, *draining}
        free = (number for number in range(MOST_REPLICAS + len(taken)) if number not in taken)
        return ScaleChange(tuple(next(free) for _ in range(wanted - len(serving))), ())
    return ScaleChange((), tuple(sorted(serving, reverse=True)[: len(serving) - wanted]))


def check_number(wanted: int) -> None:
    """Refuse a number of replicas that no run can have.

    Raises:
        InvalidRequestError: says why.
    """
    if wanted < 1:
        raise InvalidRequestError(
            f"replicas: {wanted} is below 1; a run without replicas only waits until it fails "
            "(sluice.trainer.batch_timeout_s); end it with Ctrl-C and start it again later, "
            "it resumes from its last checkpoint"
        )
    if wanted > MOST_REPLICAS:
        raise InvalidRequestError(f"replicas: {wanted} is above {MOST_REPLICAS}")


class ReplicaScale:
    """Starts and drains replicas.

    Args:
        processes: of the run.
        make_replica: the specification of the replica with a number.
        has_fixed_port: whether all replicas would listen on the same port, or answer probes there.
    """

    def __init__(
        self,
        processes: Processes,
        make_replica: Callable[[int], ServiceSpec],
        *,
        has_fixed_port: bool = False,
    ) -> None:
        self._processes = processes
        self._make_replica = make_replica
        self._has_fixed_port = has_fixed_port

    def set(self, wanted: int) -> ScaleChange:
        """Start or drain until `wanted` are left; return what was begun.

        Raises:
            InvalidRequestError: a number that a run cannot have.
            NotReadyError: the run is starting or ending.
        """
        check_number(wanted)
        if wanted > 1 and self._has_fixed_port:
            raise InvalidRequestError(
                f"replicas: {wanted} cannot share one port; start the run with "
                "sluice.rollout.endpoint.port=0, sluice.rollout.endpoint.health_port=0 and no "
                "fixed sluice.rollout.endpoint.metrics_port"
            )
        numbers: dict[bool, list[int]] = {False: [], True: []}
        for state in self._processes.services():
            if is_replica_name(state.name):
                numbers[state.is_draining].append(replica_number(state.name))
        change = scale_change(numbers[False], numbers[True], wanted)
        for number in change.start:
            self._processes.add(self._make_replica(number))
        for number in change.drain:
            self._processes.dismiss(replica_name(number))
        return change
