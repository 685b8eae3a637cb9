"""Every method of trainer, reward service and replicas, from the descriptors.

New methods are included. The launcher's service is left out: it listens on the loopback interface
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message_factory import GetMessageClass

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.api.weights.v1 import weights_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor
    from google.protobuf.message import Message

_SERVER_OF: dict[str, FileDescriptor] = {
    "trainer": trainer_pb2.DESCRIPTOR,
    "reward": reward_pb2.DESCRIPTOR,
    "rollout": rollout_pb2.DESCRIPTOR,
    "weights": weights_pb2.DESCRIPTOR,
}
_PROCESS = {
    "trainer": "trainer",
    "reward": "reward",
    "rollout": "rollout-0",
    "weights": "rollout-0",
}
# The trainer serves it at a new port while replicas join; tests/unit/weights has its strangers.
_AT_NO_FIXED_ADDRESS = {"RendezvousService"}


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. `process` serves it; `name` is ``TrainerService/Pause``; `path` is gRPC's."""

    process: str
    name: str
    path: str
    request: type[Message]
    streams_in: bool
    streams_out: bool


def all_methods() -> tuple[Method, ...]:
    """Return the methods of the four services: trainer, reward, rollout, weights."""
    return tuple(
        Method(
            _PROCESS[key],
            f"{service.name}/{method.name}",
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for key, file in _SERVER_OF.items()
        for service in file.services_by_name.values()
        if service.name not in _AT_NO_FIXED_ADDRESS
        for method in service.methods
    )
