"""Client stubs with the types of `grpc.aio`, which the generated code knows as annotations only."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.api.weights.v1 import weights_pb2_grpc

if TYPE_CHECKING:
    import grpc


def rollout_stub(channel: grpc.aio.Channel) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
    """A replica's sampling calls."""
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    return cast("rollout_pb2_grpc.RolloutServiceAsyncStub", stub)


def weight_sync_stub(channel: grpc.aio.Channel) -> weights_pb2_grpc.WeightSyncServiceAsyncStub:
    """A replica's weight updates."""
    stub = weights_pb2_grpc.WeightSyncServiceStub(channel)
    return cast("weights_pb2_grpc.WeightSyncServiceAsyncStub", stub)


def reward_stub(channel: grpc.aio.Channel) -> reward_pb2_grpc.RewardServiceAsyncStub:
    """The reward service."""
    stub = reward_pb2_grpc.RewardServiceStub(channel)
    return cast("reward_pb2_grpc.RewardServiceAsyncStub", stub)


def trainer_stub(channel: grpc.aio.Channel) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
    """The trainer."""
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    return cast("trainer_pb2_grpc.TrainerServiceAsyncStub", stub)
