"""Requests that a caller might send, to start mutations from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.weights.v1 import weights_pb2 as weights
from tools.fuzz.nasty_images import small_png

if TYPE_CHECKING:
    from google.protobuf.message import Message

DATA_SOURCE = "math_dapo"
MANY_TURNS = 20_000
_TURN = common.ChatMessage(role="user", content="1 + 2 = ?")
_TURN_WITH_IMAGE = common.ChatMessage(role="user", content="<image>")


def generate_request(request_id: str = "fuzz") -> rollout.GenerateRequest:
    """Two short samples."""
    return rollout.GenerateRequest(
        request_id=request_id,
        prompt=common.PromptInput(chat=common.ChatPrompt(messages=[_TURN])),
        sample_indexes=[0, 1],
        sampling=common.SamplingParams(temperature=1.0, max_tokens=6, seed=1),
    )


def valid_requests() -> dict[str, tuple[Message, ...]]:
    """Return requests by method; a method that is missing here gets an empty request."""
    return {
        "RolloutService/Generate": (
            *(generate_request(), _continued(), _of_tokens()),
            *(_crowded(), _with_images()),
        ),
        "WeightSyncService/JoinGroup": (_join(),),
        "WeightSyncService/StageUpdate": (weights.StageUpdateRequest(epoch=1, policy_version=1),),
        "WeightSyncService/CommitUpdate": (
            weights.CommitUpdateRequest(epoch=1, policy_version=1, digest="ab" * 16),
        ),
        "WeightSyncService/AbortUpdate": (weights.AbortUpdateRequest(epoch=99, reason="fuzz"),),
        "TrainerService/RegisterReplica": (
            trainer.RegisterReplicaRequest(replica=_replica(), weights_layout_digest="ab" * 16),
        ),
        "TrainerService/Heartbeat": (_heartbeat(),),
        "TrainerService/WatchSteps": (trainer.WatchStepsRequest(from_step=1),),
        "TrainerService/Pause": (trainer.PauseRequest(lease_seconds=0.5, holder="fuzz"),),
        "TrainerService/Resume": (trainer.ResumeRequest(holder="fuzz"),),
        "RewardService/SubmitPrompts": (_prompt(), _prompt_with_images()),
        "RewardService/TakeBatch": (reward.TakeBatchRequest(step=1, policy_version=1),),
        "RewardService/TakeImages": (reward.TakeImagesRequest(batch_id="batch"),),
        "RewardService/AcknowledgeBatch": (
            reward.AcknowledgeBatchRequest(batch_id="batch", step=1),
        ),
        "RewardService/AnnouncePolicy": (_announcement(),),
        "RewardService/Score": (_score(),),
        "RewardService/Evaluate": (reward.EvaluateRequest(policy_version=1, n=1, temperature=0.0),),
    }


def _continued() -> rollout.GenerateRequest:
    request = generate_request()
    request.stream_mode = rollout.STREAM_MODE_TOKENS
    request.partials.add(
        sample_index=1,
        token_ids_u32=bytes([3, 0, 0, 0]),
        behavior_logprobs_f32=bytes(4),
        version_spans=[common.VersionSpan(version=0, start=0, end=1)],
        finish_reason=common.FINISH_REASON_ABORTED,
    )
    return request


def _crowded() -> rollout.GenerateRequest:
    """Return more turns than are allowed: each costs the chat template time."""
    request = generate_request()
    turns = [common.ChatMessage(role="u")] * MANY_TURNS
    request.prompt.chat.messages.extend(turns)
    return request


def _with_images() -> rollout.GenerateRequest:
    """Return a prompt with a small image; the run's model reads none, so only its checks see it."""
    request = generate_request()
    request.prompt.chat.messages.append(_TURN_WITH_IMAGE)
    request.prompt.chat.images.append(small_png())
    return request


def _of_tokens() -> rollout.GenerateRequest:
    request = generate_request()
    request.prompt.tokens.token_ids_u32 = bytes([3, 0, 0, 0, 4, 0, 0, 0])
    request.sampling.stop_token_ids.append(5)
    request.partial_interval_ms = 1
    return request


def _replica() -> common.Replica:
    return common.Replica(
        name="ghost", instance_id="1", address="127.0.0.1:9", slots=8, policy_version=0
    )


def _heartbeat() -> trainer.HeartbeatRequest:
    return trainer.HeartbeatRequest(
        name="ghost",
        instance_id="1",
        slots_busy=1,
        busy_seconds=1.0,
        seconds_by_state={"idle": 1.0},
    )


def _join() -> weights.JoinGroupRequest:
    return weights.JoinGroupRequest(
        epoch=1,
        host="127.0.0.1",
        port=9,
        rank=1,
        world_size=2,
        backend="gloo",
        bucket_bytes=4096,
        timeout_seconds=1.0,
        tensors=[weights.TensorSpec(name="w", dtype="float32", shape=[2, 3])],
        plan_digest="ab" * 16,
        store_key=bytes(range(32)),
    )


def _prompt() -> reward.SubmitPromptsRequest:
    prompt = reward.SubmitPromptsRequest(
        prompt_id="fuzz", messages=[_TURN], data_source=DATA_SOURCE, ground_truth="3"
    )
    prompt.extra_info.update({"index": 1})
    return prompt


def _prompt_with_images() -> reward.SubmitPromptsRequest:
    prompt = _prompt()
    prompt.messages.append(_TURN_WITH_IMAGE)
    prompt.images.append(small_png())
    return prompt


def _announcement() -> reward.AnnouncePolicyRequest:
    return reward.AnnouncePolicyRequest(
        trainer_instance_id="somebody",
        policy_version=1,
        replicas=[_replica()],
        resume_from=common.DataProgress(low_water=1, ended_above=[3, 5]),
    )


def _score() -> reward.ScoreRequest:
    item = reward.ScoreItem(data_source=DATA_SOURCE, response="Answer: 3", ground_truth="3")
    return reward.ScoreRequest(items=[item, item])
