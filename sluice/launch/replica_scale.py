"""How many replicas a launcher keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.errors import InvalidRequestError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name, replica_number

MOST_REPLICAS = 1024


class Processes(Protocol):
    """The part of a `Supervisor` that changes the number of its processes."""

    def services(self) -> tuple[ServiceState, ...]: ...

    def add(self, spec: ServiceSpec, /) -> None: ...

    def dismiss(self, name: str, /) -> None: ...


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
        InvalidRequestError: with the reason.
    """
    if wanted < 1:
        raise InvalidRequestError(
            f"replicas: {wanted} is below 1; a run without replicas only waits until it fails "
            "(sluice.trainer.batch_timeout_s); end it with Ctrl-C and start it again later, "
            "it resumes from its last checkpoint"
        )
    if wanted > MOST_REPLICAS:
        raise InvalidRequestError(f"replicas: {wanted} is above {MOST_REPLICAS}")


@dataclass(frozen=True, slots=True)
class ReplicaScale:
    """Starts and drains replicas.

    Attributes:
        processes: of the run.
        make_replica: returns the specification of the replica with a number.
        has_fixed_port: whether all replicas would listen on the same port, or answer probes there.
    """

    processes: Processes
    make_replica: Callable[[int], ServiceSpec]
    has_fixed_port: bool = False

    def set(self, wanted: int) -> ScaleChange:
        """Start or drain replicas until `wanted` are left; return the changes begun.

        Raises:
            ConfigError: no device is left for a replica; none is started.
            InvalidRequestError: a number that a run cannot have.
            NotReadyError: the run is starting or ending.
        """
        check_number(wanted)
        if wanted > 1 and self.has_fixed_port:
            raise InvalidRequestError(
                f"replicas: {wanted} cannot share one port; start the run with "
                "sluice.rollout.endpoint.port=0, sluice.rollout.endpoint.health_port=0 and no "
                "fixed sluice.rollout.endpoint.metrics_port"
            )
        serving: list[int] = []
        draining: list[int] = []
        for state in self.processes.services():
            if (number := replica_number(state.name)) is not None:
                (draining if state.is_draining else serving).append(number)
        change = scale_change(serving, draining, wanted)
        for replica in [self.make_replica(number) for number in change.start]:
            self.processes.add(replica)
        for number in change.drain:
            self.processes.dismiss(replica_name(number))
        return change
