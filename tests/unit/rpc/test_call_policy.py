"""The table of deadlines and retries fits the protos."""

from __future__ import annotations

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from sluice.api.environment.v1 import environment_pb2
from sluice.api.launch.v1 import launch_pb2
from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.api.weights.v1 import weights_pb2
from sluice.rpc.policy import CALL_POLICIES, policy_key

MODULES = (environment_pb2, launch_pb2, reward_pb2, rollout_pb2, trainer_pb2, weights_pb2)
# What the protos promise to be harmless when it is repeated.
IDEMPOTENT = {
    "WeightSyncService/CommitUpdate",
    "RewardService/TakeBatch",
    "RewardService/AcknowledgeBatch",
    "RewardService/AnnouncePolicy",
    "RewardService/Chat",  # a repeated request is answered with its turn
    "RewardService/EndEpisode",
    "RewardService/GetStatus",
    "TrainerService/RegisterReplica",
    "TrainerService/GetStatus",
    "TrainerService/Pause",
    "TrainerService/Resume",
    "TrainerService/Stop",
    "EnvironmentService/Step",
    "EnvironmentService/GetStatus",
    "LaunchService/SetReplicas",
    "LaunchService/GetServices",
}


def methods() -> dict[str, MethodDescriptor]:
    return {
        f"{service.name}/{method.name}": method
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        # Bounded by each epoch's own timeout.
        if service.name not in ("RendezvousService", "SendingRankService")
        for method in service.methods
        if not method.GetOptions().deprecated  # not implemented any more
    }


def test_every_method_of_the_protos_has_a_policy_and_no_other_has() -> None:
    assert set(CALL_POLICIES) == set(methods())


def test_the_type_of_a_request_names_its_method() -> None:
    for name, method in methods().items():
        assert policy_key(GetMessageClass(method.input_type)()) == name


def test_only_idempotent_methods_are_retried() -> None:
    assert {name for name, policy in CALL_POLICIES.items() if policy.attempts > 1} == IDEMPOTENT


def test_streams_are_never_retried() -> None:
    for name, method in methods().items():
        if method.server_streaming or method.client_streaming:
            assert CALL_POLICIES[name].attempts == 1, name


def test_every_call_has_a_deadline() -> None:
    assert all(policy.deadline_s > 0 for policy in CALL_POLICIES.values())
