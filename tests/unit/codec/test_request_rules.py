"""Wrong values, and the field that each refusal names: one table for all requests and messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec import reward as reward_rules
from sluice.codec import rollout as rollout_rules
from sluice.codec import train_batch as batch_rules
from sluice.codec import trainer as trainer_rules
from sluice.codec import weights as weights_rules
from sluice.codec.bounds import check_fields
from sluice.codec.fields import check_text, logprobs_from_bytes, shorten, token_ids_from_bytes
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.types import FinishReason, Rollout, SamplingParams, TensorSpec, VersionSpan

LAYOUT = (TensorSpec("w.weight", "float32", (2, 3)), TensorSpec("b", "float32", ()))
ADAPTER = (
    TensorSpec("w.lora_A.weight", "float32", (1, 3)),
    TensorSpec("w.lora_B.weight", "float32", (2, 1)),
)
HUGE, NAN = 2**62, math.nan
STOP = common.FINISH_REASON_STOP


def replica(**changes: Any) -> common.Replica:
    valid = {"name": "r", "instance_id": "1", "address": "host:1", "slots": 8}
    return common.Replica(**{**valid, **changes})


def register(**changes: Any) -> trainer.RegisterReplicaRequest:
    return trainer.RegisterReplicaRequest(
        replica=replica(**changes), weights_layout_digest=changes.pop("digest", "ab")
    )


def heartbeat(**changes: Any) -> trainer.HeartbeatRequest:
    return trainer.HeartbeatRequest(**{"name": "r", "instance_id": "1", **changes})


def announce(**changes: Any) -> reward.AnnouncePolicyRequest:
    valid = {"trainer_instance_id": "t", "policy_version": 1, "replicas": [replica()]}
    return reward.AnnouncePolicyRequest(**{**valid, **changes})


def tensors(*specs: TensorSpec) -> list[weights.TensorSpec]:
    return [weights.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in specs]


PLACE: dict[str, Any] = {"group": 1, "rank": 1, "world_size": 3, "plan_digest": "ab"}


def join(**changes: Any) -> weights.JoinGroupRequest:
    valid = {
        "epoch": 1,
        "host": "h",
        "port": 1,
        "rank": 1,
        "world_size": 2,
        "backend": "gloo",
        "bucket_bytes": 4096,
        "timeout_seconds": 1.0,
        "tensors": tensors(*LAYOUT),
        "plan_digest": "ab",
    }
    return weights.JoinGroupRequest(**{**valid, **changes})


def generate(**changes: Any) -> rollout.GenerateRequest:
    return rollout.GenerateRequest(**{"sample_indexes": [0, 1023], **changes})


def chat(*roles: str) -> common.PromptInput:
    turns = [common.ChatMessage(role=role, content="1") for role in roles]
    return common.PromptInput(chat=common.ChatPrompt(messages=turns))


def score(*sources: str) -> reward.ScoreRequest:
    return reward.ScoreRequest(items=[reward.ScoreItem(data_source=source) for source in sources])


def check_generate(request: rollout.GenerateRequest) -> None:
    rollout_rules.check_generate(request, 8)


def check_join(request: weights.JoinGroupRequest) -> None:
    weights_rules.check_join(request, LAYOUT)


def check_pause(request: trainer.PauseRequest) -> None:
    trainer_rules.check_pause(request, ())


def check_prompt(request: reward.SubmitPromptsRequest) -> None:
    reward_rules.check_prompt(request, 4)


def decode_sampling(message: common.SamplingParams) -> SamplingParams:
    return rollout_rules.sampling_from_proto(message, default_seed=7, longest=99)


def stopped(**changes: Any) -> common.Rollout:
    return common.Rollout(**{"finish_reason": STOP, **changes})


def two_tokens(start: int, end: int) -> common.Rollout:
    span = common.VersionSpan(version=1, start=start, end=end)
    arrays = {"token_ids_u32": bytes(8), "behavior_logprobs_f32": bytes(8)}
    return stopped(sample_index=3, version_spans=[span], **arrays)


def routed(**changes: Any) -> common.Rollout:
    sizes = {"layers": 2, "experts_per_token": 3, "bytes_per_expert": 1, "experts": bytes(12)}
    message = two_tokens(0, 2)
    message.routing.CopyFrom(common.RoutedExperts(**{**sizes, **changes}))
    return message


def batch_of(*groups: reward.TrainGroup) -> reward.TrainBatch:
    return reward.TrainBatch(groups=groups)


TURN = common.ChatMessage(role="user", content="1")
Check = Callable[[Any], object]
VALID: list[tuple[Check, Any]] = [
    (trainer_rules.check_register, register()),
    (trainer_rules.check_register, register(address="[fd00::1]:7001")),
    (trainer_rules.check_heartbeat, heartbeat(busy_seconds=1e9, seconds_by_state={"idle": 1.0})),
    (check_fields, trainer.WatchStepsRequest()),
    (check_pause, trainer.PauseRequest()),
    (check_pause, trainer.PauseRequest(lease_seconds=0.5, holder="a person")),
    (check_fields, trainer.StopRequest(reason="seen\nenough")),
    (reward_rules.check_announcement, announce()),
    (check_fields, reward.TakeBatchRequest(step=1)),
    (check_fields, reward.AcknowledgeBatchRequest(batch_id="b", step=1)),
    (check_fields, reward.EvaluateRequest(n=1024, temperature=0.0)),
    (check_prompt, reward.SubmitPromptsRequest(prompt_id="a b", messages=[TURN] * 4)),
    (check_generate, generate(stream_mode=rollout.STREAM_MODE_TOKENS)),
    (check_generate, generate(prompt=chat(*["x" * 64] * 1024))),
    (reward_rules.check_score, score("", "x" * 256)),
    (check_join, join()),
    *((check_join, join(store_key=bytes(n))) for n in (0, 32)),
    (check_join, join(tensors=tensors(*LAYOUT, *ADAPTER))),
    (check_fields, weights.StageUpdateRequest(epoch=1)),
    (check_fields, weights.CommitUpdateRequest(epoch=1, digest="ab")),
    (check_fields, weights.AbortUpdateRequest(reason="a\nb")),
    *((decode_sampling, common.SamplingParams(temperature=t)) for t in (0.0, 100.0)),
    *((decode_sampling, common.SamplingParams(top_p=1.0, top_k=k)) for k in (-1, 1)),
]
REFUSED: list[tuple[Check, Any, str]] = [
    *(
        (trainer_rules.check_register, register(name=n), "replica.name")
        for n in ("", "a\n", "é" * 65)
    ),
    (trainer_rules.check_register, register(instance_id="\0"), "replica.instance_id"),
    *((trainer_rules.check_register, register(slots=s), "replica.slots") for s in (0, 65537)),
    *(
        (trainer_rules.check_register, register(address=address), "replica.address")
        for address in ("", "host", "host:0", "host:65536", "a b:1", "http://h:1", ":1", "unix:/x")
    ),
    (trainer_rules.check_heartbeat, heartbeat(name=""), "name"),
    *(
        (trainer_rules.check_heartbeat, heartbeat(busy_seconds=v), "busy")
        for v in (NAN, math.inf, -1)
    ),
    (trainer_rules.check_heartbeat, heartbeat(wall_seconds=NAN), "wall_seconds"),
    (trainer_rules.check_heartbeat, heartbeat(seconds_by_state={"idle": NAN}), "idle"),
    (
        trainer_rules.check_heartbeat,
        heartbeat(seconds_by_state={str(i): 1.0 for i in range(17)}),
        "seconds_by_state: 17",
    ),
    (trainer_rules.check_heartbeat, heartbeat(policy_version=-1), "policy_version"),
    (trainer_rules.check_heartbeat, heartbeat(generated_tokens=2**64 - 1), "generated_tokens"),
    *((check_fields, trainer.WatchStepsRequest(from_step=s), "from_step") for s in (-1, HUGE)),
    *(
        (check_pause, trainer.PauseRequest(lease_seconds=s), "lease_seconds")
        for s in (NAN, math.inf, -1.0, 0.0, 1e9)
    ),
    (check_pause, trainer.PauseRequest(holder="x" * 129), "holder"),
    (check_fields, trainer.ResumeRequest(holder="\x1b[2J"), "holder"),
    (check_fields, trainer.StopRequest(reason="x" * 2001), "reason"),
    (reward_rules.check_announcement, announce(trainer_instance_id=""), "trainer_instance_id"),
    (reward_rules.check_announcement, announce(policy_version=HUGE), "policy_version"),
    (reward_rules.check_announcement, announce(replicas=[replica(), replica()]), "twice"),
    (reward_rules.check_announcement, announce(replicas=[replica(slots=2**31)]), "slots"),
    (reward_rules.check_announcement, announce(replicas=[replica(ranks=1025)]), "ranks"),
    *(
        (
            reward_rules.check_announcement,
            announce(resume_from=common.DataProgress(low_water=low, ended_above=above)),
            "resume_from",
        )
        for low, above in ((-1, []), (HUGE, []), (5, [4]), (5, [7, 7]), (5, [9, 8]))
    ),
    *(
        (
            reward_rules.check_announcement,
            announce(resume_from=common.DataProgress(sources={name: one})),
            "resume_from.sources",
        )
        for name, one in (
            ("math", common.DataProgress(low_water=-1)),
            ("math", common.DataProgress(low_water=5, ended_above=[4])),
            ("\x1b[2J", common.DataProgress()),
        )
    ),
    *((check_fields, reward.TakeBatchRequest(step=s), "step") for s in (0, -1, HUGE)),
    (check_fields, reward.TakeBatchRequest(step=1, policy_version=-1), "policy_version"),
    (check_fields, reward.AcknowledgeBatchRequest(step=1), "batch_id"),
    *((check_fields, reward.EvaluateRequest(n=n), "n: ") for n in (0, 1025)),
    *(
        (check_fields, reward.EvaluateRequest(temperature=t), "temperature")
        for t in (NAN, -1.0, 101.0)
    ),
    (check_prompt, reward.SubmitPromptsRequest(messages=[TURN] * 5), "messages: 5"),
    (check_prompt, reward.SubmitPromptsRequest(prompt_id="a\r"), "prompt_id"),
    (check_prompt, reward.SubmitPromptsRequest(data_source="x" * 257), "data_source"),
    (
        check_prompt,
        reward.SubmitPromptsRequest(messages=[common.ChatMessage(role="x" * 65)]),
        "role",
    ),
    *(
        (check_generate, rollout.GenerateRequest(sample_indexes=indexes), "sample_indexes")
        for indexes in ([], [0, 0], list(range(9)), [1024], [2**32 - 1])
    ),
    (check_generate, generate(request_id="x" * 129), "request_id"),
    *(
        (check_generate, generate(sampling=common.SamplingParams(stop=stop)), "sampling.stop")
        for stop in (["x"] * 17, [""], ["x", "é" * 65])
    ),
    (check_generate, generate(prompt=chat(*["u"] * 1025)), "prompt.chat.messages: 1025"),
    (check_generate, generate(prompt=chat("user", "é" * 33)), "prompt.chat.messages[1].role"),
    (reward_rules.check_score, score("math", "x" * 257), "items[1].data_source"),
    (check_generate, generate(stream_mode=99), "stream_mode"),
    (check_generate, generate(linger_ms=2**32 - 1), "linger_ms"),
    (check_generate, generate(partial_interval_ms=2**32 - 1), "partial_interval_ms"),
    (check_generate, generate(partials=[common.Rollout()] * 3), "partials: 3"),
    (check_join, join(epoch=-1), "epoch"),
    (check_join, join(host=""), "host"),
    *((check_join, join(port=p), "port") for p in (0, 65536)),
    *((check_join, join(world_size=w), "world_size") for w in (0, 1, 2**32 - 1)),
    *((check_join, join(rank=r), "rank") for r in (0, 2)),
    *((check_join, join(bucket_bytes=b), "bucket_bytes") for b in (0, 4095, 2**63)),
    *((check_join, join(timeout_seconds=s), "timeout_seconds") for s in (0, -1, NAN, math.inf)),
    *((check_join, join(store_key=bytes(n)), "store_key") for n in (1, 31, 33, 4096)),
    (check_join, join(tensors=[]), "tensors: 0"),
    *(
        (
            check_join,
            join(
                tensors=[
                    weights.TensorSpec(name="w.weight", shape=shape),
                    weights.TensorSpec(name="b"),
                ]
            ),
            "tensors: 'w.weight'",
        )
        for shape in ([2**40], [-2, -3], [2], [2, 3, 1])
    ),
    (check_fields, weights.StageUpdateRequest(epoch=-1), "epoch"),
    (check_fields, weights.CommitUpdateRequest(epoch=1), "digest"),
    (check_fields, weights.AbortUpdateRequest(reason="x" * 4001), "reason"),
    # messages that cannot be decoded
    (rollout_rules.rollout_from_proto, common.Rollout(), "rollout.finish_reason: 0 is unknown"),
    (rollout_rules.rollout_from_proto, stopped(finish_reason=77), "rollout.finish_reason: 77"),
    (rollout_rules.rollout_from_proto, stopped(token_ids_u32=b"123"), "rollout.token_ids_u32"),
    (
        rollout_rules.rollout_from_proto,
        stopped(behavior_logprobs_f32=b"12345"),
        "rollout.behavior_logprobs_f32",
    ),
    (rollout_rules.rollout_from_proto, stopped(token_ids_u32=bytes(4)), "behavior logprobs"),
    (
        rollout_rules.rollout_from_proto,
        two_tokens(0, 1),
        "rollout 3: version spans cover 1 of 2 tokens",
    ),
    (rollout_rules.rollout_from_proto, two_tokens(1, 2), "version spans leave gaps"),
    *(
        (rollout_rules.rollout_from_proto, routed(**{field: value}), f"routing.{field}: {value}")
        for field, values in (
            ("layers", (0, 1025, 2**32 - 1)),
            ("experts_per_token", (0, 257, 2**32 - 1)),
            ("bytes_per_expert", (0, 3, 2**32 - 1)),
        )
        for value in values
    ),
    *(
        (rollout_rules.rollout_from_proto, routed(experts=bytes(size)), f"experts: {size} bytes")
        for size in (0, 5, 13)
    ),
    (
        rollout_rules.rollout_from_proto,
        routed(experts=bytes(6)),
        "rollout 3: experts of 1 tokens, prompt included, for 2 tokens of the response",
    ),
    *(
        (decode_sampling, common.SamplingParams(**{field: value}), f"sampling.{field}: {value}")
        for field, values in (
            ("temperature", (-0.5, 100.5, NAN)),
            ("top_p", (0.0, 1.5, NAN)),
            ("top_k", (0, -2)),
        )
        for value in values
    ),
    (
        batch_rules.outline_from_proto,
        batch_of(reward.TrainGroup(prompt_id="p7", rollouts=[stopped()])),
        "group p7: 0 scores for 1 rollouts",
    ),
    *(
        (
            weights_rules.group_spec_from_proto,
            weights.JoinGroupRequest(rank=rank, world_size=world_size),
            f"rank {rank} of {world_size}",
        )
        for rank, world_size in ((0, 2), (2, 2), (5, 2), (0, 0))
    ),
    *(
        (
            weights_rules.group_spec_from_proto,
            weights.JoinGroupRequest(ranks=2, places=[weights.WorkerPlace(**one) for one in given]),
            words,
        )
        for given, words in (
            ([PLACE], "places: 1 for 2 ranks"),
            ([PLACE, PLACE | {"rank": 3}], "places[1].rank: 3; send 1 to 2"),
            ([PLACE | {"rank": 0}, PLACE], "places[0].rank: 0"),
            ([PLACE, PLACE | {"world_size": 1}], "places[1].world_size: 1"),
            ([PLACE, PLACE | {"group": 70_000}], "places[1].group: 70000"),
            ([PLACE, PLACE | {"plan_digest": ""}], "places[1].plan_digest: missing"),
        )
    ),
    (
        lambda shares: weights_rules.shares_from_proto(shares, 2),
        [weights.WeightShare()],
        "shares: 1 for 2 ranks; send one for each, or none",
    ),
    (
        lambda shares: weights_rules.shares_from_proto(shares, 1),
        [
            weights.WeightShare(
                tensors=[weights.TensorCuts(name="w", cuts=[weights.Cut(starts=[1], lengths=[])])]
            )
        ],
        "shares[0]: a cut has 1 starts and 0 lengths",
    ),
    (rollout_rules.chat_messages_from_proto, [], "messages: empty"),
    (
        rollout_rules.chat_messages_from_proto,
        [TURN, common.ChatMessage()],
        "messages[1].role: empty",
    ),
]


@pytest.mark.parametrize(("check", "request_"), VALID)
def test_what_a_caller_may_send_is_taken(check: Check, request_: Any) -> None:
    check(request_)


@pytest.mark.parametrize(("check", "request_", "field"), REFUSED)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(
    check: Check, request_: Any, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(request_)
    assert field in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def partial(logprobs: list[float], version: int = 0) -> Rollout:
    size = len(logprobs)
    spans = (VersionSpan(version, 0, size),)
    ids, values = np.zeros(size, np.uint32), np.array(logprobs, np.float32)
    return Rollout.of_one_turn(0, ids, values, spans, FinishReason.ABORTED, "")


@pytest.mark.parametrize("broken", [partial([-1.0, NAN]), partial([-math.inf]), partial([0.0], -1)])
def test_a_partial_with_impossible_numbers_is_not_continued(broken: Rollout) -> None:
    rollout_rules.check_partials([partial([-1.0, 0.0])], longest=2)
    with pytest.raises(InvalidRequestError, match="partials"):
        rollout_rules.check_partials([broken], longest=2)


def test_a_partial_that_is_longer_than_the_model_takes_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidRequestError, match=r"partials\[0\].*: 3 tokens; the model takes 2"):
        rollout_rules.check_partials([partial([-1.0, 0.0, 0.0])], longest=2)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_further_information_that_is_not_json_is_refused(value: float) -> None:
    struct = Struct()
    struct.update({"a": [1.0, {"b": value}]})
    with pytest.raises(InvalidRequestError, match="extra_info: not JSON"):
        reward_rules.extra_info_of(struct, "extra_info", 1 << 20)


def test_whole_numbers_of_a_clients_row_are_integers_as_in_a_data_set() -> None:
    row = {"jars": {"A": 7, "B": [2, 0.5]}, "is_new": True, "large": 1e300}
    struct = Struct()
    struct.update(row)
    found = reward_rules.extra_info_of(struct, "extra_info", 1 << 20)
    assert json.dumps(found, sort_keys=True) == json.dumps(row, sort_keys=True)


def test_further_information_is_bounded_before_it_is_looked_at() -> None:
    struct = Struct()
    struct.update({"a": "x" * 1024})
    assert reward_rules.extra_info_of(struct, "extra_info", 2048) == {"a": "x" * 1024}
    with pytest.raises(InvalidRequestError, match="max_extra_info_kb"):
        reward_rules.extra_info_of(struct, "extra_info", 1024)


def test_the_run_is_held_by_few_and_watched_by_few() -> None:
    holders = [str(number) for number in range(trainer_rules.MAX_HOLDERS)]
    trainer_rules.check_pause(trainer.PauseRequest(holder="1"), holders)
    with pytest.raises(ExhaustedError, match="holder"):
        trainer_rules.check_pause(trainer.PauseRequest(holder="another"), holders)
    trainer_rules.check_watchers(1, 2)
    with pytest.raises(ExhaustedError, match="max_watchers"):
        trainer_rules.check_watchers(2, 2)


@given(st.text())
def test_a_shown_value_is_one_short_printable_line(value: str) -> None:
    assert shorten(value).isprintable()
    assert len(shorten(value)) < 700


@given(st.text(max_size=40))
def test_the_length_of_a_text_counts_in_bytes(value: str) -> None:
    size = len(value.encode())
    check_text("field", value, size)
    if size:
        with pytest.raises(InvalidRequestError, match="field"):
            check_text("field", value, size - 1)


@pytest.mark.parametrize("decode", [token_ids_from_bytes, logprobs_from_bytes])
@given(st.binary(max_size=40).filter(lambda data: len(data) % 4))
def test_a_torn_array_is_refused_by_name(decode: Callable[[bytes, str], Any], data: bytes) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"batch\.x: {len(data)} bytes are not a multiple of 4"
    ):
        decode(data, "batch.x")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_batch_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with suppress(InvalidRequestError):
        batch_rules.outline_from_bytes(data)


def test_absent_parameters_take_the_protocols_defaults() -> None:
    value = decode_sampling(common.SamplingParams())
    assert (value.temperature, value.top_p, value.top_k) == (1.0, 1.0, -1)
    assert (value.seed, value.max_tokens) == (7, 99)
    assert decode_sampling(common.SamplingParams(seed=0)).seed == 0
