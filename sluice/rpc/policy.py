"""Deadlines and retries of every method, in one table.

Only idempotent methods are retried, and only when the peer was unavailable. A method that enters
a collective is never retried. Each call sets its deadline, because a timeout of gRPC's service
configuration misbehaves in grpcio (upstream issues 34547, 40633).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """Deadline and retries of one method.

    Args:
        deadline_s: seconds for one try unless the caller gives its own.
        attempts: tries in all; above 1 only for idempotent methods.
        backoff_s: pause before the second try, seconds; doubled before each further one.
    """

    deadline_s: float
    attempts: int = 1
    backoff_s: float = 0.2


_QUICK = CallPolicy(deadline_s=5.0, attempts=3)

CALL_POLICIES: dict[str, CallPolicy] = {
    "RolloutService/Generate": CallPolicy(deadline_s=600.0),
    "RolloutService/GetStatus": CallPolicy(deadline_s=3.0),
    "WeightSyncService/JoinGroup": CallPolicy(deadline_s=30.0),
    # The trainer sets a deadline that grows with the size of the weights.
    "WeightSyncService/StageUpdate": CallPolicy(deadline_s=300.0),
    "WeightSyncService/CommitUpdate": CallPolicy(deadline_s=60.0, attempts=2),
    "WeightSyncService/AbortUpdate": CallPolicy(deadline_s=5.0),
    # Weights move to host memory: seconds for each 100 GB.
    "WeightSyncService/Sleep": CallPolicy(deadline_s=60.0),
    # A submission stays open until its prompts end; the SDK opens another call after a day.
    "RewardService/SubmitPrompts": CallPolicy(deadline_s=86_400.0),
    "RewardService/TakeBatch": CallPolicy(deadline_s=600.0, attempts=3),
    # A rank ends it when no message comes; this is only an upper bound.
    "RewardService/TakeSamples": CallPolicy(deadline_s=86_400.0),
    "RewardService/AcknowledgeBatch": _QUICK,
    # A trainer's first announcement waits until all that runs is cancelled, and until the clients'
    # prompts that its policy was not trained on are read; a repeated call begins this read again.
    "RewardService/AnnouncePolicy": CallPolicy(deadline_s=30.0, attempts=3),
    # The scorers' own limits end it; this is only an upper bound.
    "RewardService/Score": CallPolicy(deadline_s=7200.0),
    # The callers end it when progress stops; this is only an upper bound.
    "RewardService/Evaluate": CallPolicy(deadline_s=604_800.0),
    "RewardService/LeaseSamples": CallPolicy(deadline_s=90.0),
    # A repeated request is answered with the turn that was sampled for it. The HTTP caller ends
    # it; this is only an upper bound.
    "RewardService/Chat": CallPolicy(deadline_s=86_400.0, attempts=3),
    "RewardService/EndEpisode": _QUICK,
    "RewardService/GetStatus": _QUICK,
    "TrainerService/RegisterReplica": _QUICK,
    "TrainerService/Heartbeat": CallPolicy(deadline_s=3.0),
    "TrainerService/GetStatus": _QUICK,
    "TrainerService/WatchSteps": CallPolicy(deadline_s=86_400.0),
    "TrainerService/SaveCheckpoint": CallPolicy(deadline_s=1800.0),
    "TrainerService/Pause": _QUICK,
    "TrainerService/Resume": _QUICK,
    "TrainerService/Stop": _QUICK,
    # The reward service gives each call what `sluice.environment.call_timeout_s` leaves.
    "EnvironmentService/Open": CallPolicy(deadline_s=60.0),
    # A repeated turn has the same answer.
    "EnvironmentService/Step": CallPolicy(deadline_s=60.0, attempts=2),
    "EnvironmentService/Close": CallPolicy(deadline_s=60.0),
    "EnvironmentService/Play": CallPolicy(deadline_s=60.0),
    "EnvironmentService/GetStatus": _QUICK,
    "LaunchService/SetReplicas": _QUICK,
    # The launcher is on this machine, so a refused connection says that it is gone.
    "LaunchService/GetServices": CallPolicy(deadline_s=5.0, attempts=2, backoff_s=0.1),
}


def policy_key(request: Message) -> str:
    """Return ``Service/Method`` of a request, its key in `CALL_POLICIES`.

    Method Xyz of a service takes an XyzRequest of the same proto file.
    """
    method = request.DESCRIPTOR.name.removesuffix("Request")
    services = request.DESCRIPTOR.file.services_by_name.values()
    (service,) = (
        service_descriptor.name
        for service_descriptor in services
        if method in service_descriptor.methods_by_name
    )
    return f"{service}/{method}"


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return channel arguments that bound messages both ways."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]
