"""The trainer's calls to the reward service: which failures are waited out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from services.trainer.loop.reward_client import RewardClient
from sluice import own_version
from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2
from sluice.errors import (
    BatchUnfillableError,
    DeadlineError,
    NotFoundError,
    PeerDefectError,
    PeerError,
    SluiceError,
)
from sluice.rpc import client as call
from sluice.rpc import retries
from sluice.rpc.status import status_of
from sluice.types import DataProgress, TrainBatch

UNAVAILABLE, DEADLINE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
INTERNAL = grpc.StatusCode.INTERNAL


class Clock:
    """Replacement of `time` and `asyncio`: time passes only during sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Stub:
    """Answers by method name: messages, or codes to fail with; the last one for ever."""

    def __init__(self, clock: Clock) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.requests: dict[str, list[Any]] = {}
        self._clock = clock

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def answer(request: Any, *, timeout: float | None = None) -> Any:
            self.requests.setdefault(method, []).append(request)
            answers = self.answers[method]
            given = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(given, float):  # the call fails after so many seconds
                self._clock.now_s += given
                given = UNAVAILABLE
            if isinstance(given, SluiceError):
                code, details, trailer = status_of(given)
                trailing = grpc.aio.Metadata(*trailer)
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
            if isinstance(given, grpc.StatusCode):
                if given is DEADLINE:
                    self._clock.now_s += timeout or 0.0
                empty = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(given, empty, empty, details="scripted")
            return given

        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    for module in (retries, call):
        monkeypatch.setattr(module, "asyncio", clock)
    return clock


@pytest.fixture
def stub(clock: Clock) -> Stub:
    return Stub(clock)


@pytest.fixture
def client(stub: Stub) -> RewardClient:
    return RewardClient(stub, "trainer-1", batch_timeout_s=60.0)  # type: ignore[arg-type]


async def test_a_short_absence_is_waited_out_when_a_policy_is_announced(
    client: RewardClient, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.answers["AnnouncePolicy"] = [UNAVAILABLE] * 20 + [reward_pb2.AnnouncePolicyResponse()]
    with caplog.at_level(logging.WARNING):
        await client.announce(3, [])
    assert caplog.text.count("reward service out of reach") == 1
    assert stub.requests["AnnouncePolicy"][-1].policy_version == 3


async def test_a_rollback_is_announced_again_to_a_service_that_restarts(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["AnnouncePolicy"] = [UNAVAILABLE, reward_pb2.AnnouncePolicyResponse()]
    await client.announce(5, [], rolled_back_to=2)
    assert [request.rolled_back_to for request in stub.requests["AnnouncePolicy"]] == [2, 2]
    assert {one.sluice_version for one in stub.requests["AnnouncePolicy"]} == {own_version()}
    stub.answers["AnnouncePolicy"] = [reward_pb2.AnnouncePolicyResponse()]
    await client.announce(6, [])
    assert not stub.requests["AnnouncePolicy"][-1].HasField("rolled_back_to")


async def test_a_short_absence_is_waited_out_when_a_batch_is_acknowledged(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["AcknowledgeBatch"] = [
        UNAVAILABLE,
        DEADLINE,
        *[UNAVAILABLE] * 5,
        reward_pb2.AcknowledgeBatchResponse(),
    ]
    await client.acknowledge("batch", 1)
    assert len(stub.requests["AcknowledgeBatch"]) == 8


async def test_a_long_absence_is_an_error_that_names_the_call(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["AnnouncePolicy"] = [UNAVAILABLE]
    began_s = clock.now_s
    with pytest.raises(PeerError, match="reward service: failed while announcing a policy"):
        await client.announce(3, [])
    assert 60.0 <= clock.now_s - began_s <= 65.0


async def test_a_broken_service_is_asked_a_few_times_to_take_an_announcement(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["AnnouncePolicy"] = [INTERNAL]
    with pytest.raises(PeerDefectError, match="announcing a policy: INTERNAL: scripted"):
        await client.announce(3, [])
    assert len(stub.requests["AnnouncePolicy"]) == 3


async def test_a_lease_that_is_gone_is_logged_and_not_an_error(
    client: RewardClient, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.answers["AcknowledgeBatch"] = [NotFoundError("never leased")]
    await client.acknowledge("batch-7", 1)
    assert "batch batch-7 was trained but its lease is gone" in caplog.text
    assert len(stub.requests["AcknowledgeBatch"]) == 1


def no_tokens() -> int:
    return 0


async def all_come(batch: TrainBatch, step: int) -> str:
    return ""


def status(**given: Any) -> reward_pb2.GetStatusResponse:
    return reward_pb2.GetStatusResponse(**given)


async def test_a_batch_is_waited_for_as_long_as_the_service_makes_progress(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["TakeBatch"] = [
        *[DEADLINE] * 20,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status(prompts_submitted=n) for n in range(20)]
    began_s = clock.now_s
    assert (await client.take_batch(1, 0, no_tokens, all_come)).batch_id == "b"
    assert clock.now_s - began_s > 2 * 60.0


def awaiting(peer: str, seconds: float) -> reward_pb2.GetStatusResponse:
    wait = reward_pb2.Awaited(peer=peer, phase="working on samples", seconds=seconds)
    return status(prompts_submitted=5, awaited=[wait])


@pytest.mark.parametrize("peer", ["agent", "environment"])
async def test_a_batch_is_waited_for_while_all_samples_are_with_agents_or_environments(
    client: RewardClient, stub: Stub, clock: Clock, peer: str
) -> None:
    stub.answers["TakeBatch"] = [
        *[DEADLINE] * 20,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [awaiting(peer, 15.0 * n) for n in range(20)]
    assert (await client.take_batch(1, 0, no_tokens, all_come)).batch_id == "b"


async def test_time_at_a_fleet_that_hangs_is_no_progress(client: RewardClient, stub: Stub) -> None:
    stub.answers["TakeBatch"] = [DEADLINE]
    stub.answers["GetStatus"] = [awaiting("rollout fleet", 15.0 * n) for n in range(20)]
    with pytest.raises(DeadlineError, match="while filling the batch of step 4"):
        await client.take_batch(4, 3, no_tokens, all_come)


async def test_a_service_that_stands_still_ends_the_wait_for_a_batch(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["TakeBatch"] = [DEADLINE]
    stub.answers["GetStatus"] = [status(prompts_submitted=5)]
    with pytest.raises(DeadlineError, match="while filling the batch of step 4"):
        await client.take_batch(4, 3, no_tokens, all_come)


async def test_a_batch_of_long_responses_is_waited_for_as_long_as_the_fleet_draws_tokens(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["TakeBatch"] = [
        *[DEADLINE] * 20,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status(prompts_submitted=5)]
    assert (await client.take_batch(1, 0, lambda: int(clock.now_s), all_come)).batch_id == "b"


async def test_tokens_do_not_lengthen_the_wait_for_a_service_that_is_gone(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["TakeBatch"] = [UNAVAILABLE]
    stub.answers["GetStatus"] = [UNAVAILABLE]
    with pytest.raises(DeadlineError, match="while filling the batch of step 1"):
        await client.take_batch(1, 0, lambda: int(clock.now_s), all_come)


async def test_a_service_that_fails_at_once_is_not_asked_without_a_pause(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["TakeBatch"] = [grpc.StatusCode.CANCELLED]
    stub.answers["GetStatus"] = [status(prompts_submitted=5)]
    with pytest.raises(DeadlineError, match="while filling the batch of step 4"):
        await client.take_batch(4, 3, no_tokens, all_come)
    assert len(stub.requests["TakeBatch"]) <= 250  # 60 s, four times a second


async def test_a_service_that_says_three_times_in_a_row_that_it_is_broken_ends_the_wait(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["TakeBatch"] = [INTERNAL]
    stub.answers["GetStatus"] = [status(prompts_submitted=n) for n in range(200)]
    with pytest.raises(PeerDefectError, match="taking the batch of step 4: INTERNAL: scripted"):
        await client.take_batch(4, 3, no_tokens, all_come)
    assert len(stub.requests["TakeBatch"]) == 3


@pytest.mark.parametrize("between", [[DEADLINE], [UNAVAILABLE] * 3])
async def test_a_defect_now_and_then_is_waited_out(
    client: RewardClient, stub: Stub, between: list[grpc.StatusCode]
) -> None:
    stub.answers["TakeBatch"] = [
        *[INTERNAL, INTERNAL, *between] * 3,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status(prompts_submitted=n) for n in range(200)]
    assert (await client.take_batch(4, 3, no_tokens, all_come)).batch_id == "b"


async def test_streams_of_samples_that_always_fail_end_the_wait_with_their_cause(
    client: RewardClient, stub: Stub
) -> None:
    async def broken(batch: TrainBatch, step: int) -> str:
        return "INTERNAL: defect"

    stub.answers["TakeBatch"] = [
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b"))
    ]
    stub.answers["GetStatus"] = [status(prompts_submitted=n) for n in range(200)]
    with pytest.raises(PeerError, match="taking the batch of step 4: INTERNAL: defect"):
        await client.take_batch(4, 3, no_tokens, broken)
    assert len(stub.requests["TakeBatch"]) == 6


async def test_a_stream_that_breaks_after_a_long_wait_for_the_batch_is_waited_out(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    reasons = ["the connection is gone", ""]

    async def breaks_once(batch: TrainBatch, step: int) -> str:
        clock.now_s += 20.0
        return reasons.pop(0)

    stub.answers["TakeBatch"] = [
        *[DEADLINE] * 4,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
        DEADLINE,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status(prompts_submitted=5)]
    assert (await client.take_batch(1, 0, no_tokens, breaks_once)).batch_id == "b"


async def test_a_service_that_restarts_while_a_batch_is_awaited_gets_the_policy_again(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["AnnouncePolicy"] = [reward_pb2.AnnouncePolicyResponse()]
    await client.announce(3, [], lambda: DataProgress(40))
    stub.answers["TakeBatch"] = [
        *[UNAVAILABLE] * 6,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    known = status(policy_version=3)
    stub.answers["GetStatus"] = [known, status(), known]
    assert (await client.take_batch(4, 3, no_tokens, all_come)).batch_id == "b"
    first, again = stub.requests["AnnouncePolicy"]
    assert again == first
    assert again.resume_from.low_water == 40


async def test_a_version_that_is_announced_again_never_comes_after_a_newer_one(
    client: RewardClient, stub: Stub, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = reward_pb2.AnnouncePolicyResponse()
    stub.answers["AnnouncePolicy"] = [done, UNAVAILABLE, done]
    await client.announce(3, [])
    stub.answers["TakeBatch"] = [
        DEADLINE,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status()]

    async def sleep(seconds: float) -> None:
        """Let the trainer publish version 4 while the announcement of 3 waits for its next try."""
        if len(stub.requests["AnnouncePolicy"]) == 2 and seconds:
            tasks.create_task(client.announce(4, []))
        for _ in range(5):
            await asyncio.sleep(0)

    monkeypatch.setattr(clock, "sleep", sleep)
    async with asyncio.TaskGroup() as tasks:
        await client.take_batch(4, 3, no_tokens, all_come)
    versions = [request.policy_version for request in stub.requests["AnnouncePolicy"]]
    assert versions[-1] == 4


async def test_a_restarted_service_gets_the_current_position_in_the_data_set(
    client: RewardClient, stub: Stub
) -> None:
    stands_at = DataProgress(40)
    stub.answers["AnnouncePolicy"] = [reward_pb2.AnnouncePolicyResponse()]
    await client.announce(3, [], lambda: stands_at)
    stands_at = DataProgress(48, (50,))
    stub.answers["TakeBatch"] = [
        DEADLINE,
        reward_pb2.TakeBatchResponse(batch=reward_pb2.TrainBatch(batch_id="b")),
    ]
    stub.answers["GetStatus"] = [status()]
    await client.take_batch(4, 3, no_tokens, all_come)
    _, again = stub.requests["AnnouncePolicy"]
    assert again.policy_version == 3
    assert (again.resume_from.low_water, list(again.resume_from.ended_above)) == (48, [50])


async def test_what_is_no_batch_is_an_error_that_names_it(client: RewardClient, stub: Stub) -> None:
    rollout = common_pb2.Rollout(
        sample_index=1,
        num_tokens=1,
        finish_reason=common_pb2.FINISH_REASON_STOP,
    )
    group = reward_pb2.TrainGroup(
        prompt_id="p", rollouts=[rollout], scores=[common_pb2.Score(score=1.0)]
    )
    batch = reward_pb2.TrainBatch(batch_id="b-7", groups=[group])
    stub.answers["TakeBatch"] = [reward_pb2.TakeBatchResponse(batch=batch)]
    with pytest.raises(PeerError, match=r"batch b-7: rollout 1: .* the batch is refused"):
        await client.take_batch(1, 0, no_tokens, all_come)
    assert len(stub.requests["TakeBatch"]) == 1


async def test_an_unfillable_batch_is_not_asked_for_again(client: RewardClient, stub: Stub) -> None:
    stub.answers["TakeBatch"] = [BatchUnfillableError("almost no group is mixed")]
    with pytest.raises(BatchUnfillableError):
        await client.take_batch(1, 0, no_tokens, all_come)
    assert len(stub.requests["TakeBatch"]) == 1


async def test_the_start_of_the_service_is_waited_for_within_a_deadline(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["GetStatus"] = [*[UNAVAILABLE] * 30, status(dataset_rows=12)]
    assert await client.wait_until_up(60.0) == 12
    stub.answers["GetStatus"] = [UNAVAILABLE]
    with pytest.raises(DeadlineError, match="reward service: no answer within 2 s while starting"):
        await client.wait_until_up(2.0)


async def test_a_service_that_is_broken_at_its_start_is_asked_three_times_with_pauses(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["GetStatus"] = [grpc.StatusCode.CANCELLED]
    with pytest.raises(DeadlineError, match="while starting"):
        await client.wait_until_up(10.0)
    assert len(stub.requests["GetStatus"]) <= 50  # 10 s, four times a second
    stub.answers["GetStatus"], stub.requests["GetStatus"] = [INTERNAL], []
    with pytest.raises(PeerDefectError, match="INTERNAL: scripted"):
        await client.wait_until_up(10.0)
    assert len(stub.requests["GetStatus"]) == 3


async def test_a_short_absence_is_waited_out_when_the_accounts_are_asked_for(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["GetStatus"], began_s = [UNAVAILABLE], clock.now_s
    with pytest.raises(PeerError):
        await client.accounts(patience_s=30.0)
    assert 30.0 <= clock.now_s - began_s <= 35.0
    num_asked = len(stub.requests["GetStatus"])
    stub.answers["GetStatus"] = [*[UNAVAILABLE] * num_asked, status(prompts_submitted=9)]
    assert (await client.accounts())["submitted"] == 9.0


async def test_accounts_are_one_number_for_each_way_a_prompt_can_end_and_what_the_service_counts(
    client: RewardClient, stub: Stub
) -> None:
    counted = {"reward/groups_acknowledged": 6.0, "reward/prompts_lost": 1.0, "reward/other": 3.0}
    stub.answers["GetStatus"] = [
        status(
            prompts_submitted=9,
            prompts_pending=2,
            prompts_by_end={"trained": 7},
            statistics=counted,
        )
    ]
    assert await client.accounts() == {
        "submitted": 9.0,
        "pending": 2.0,
        "trained": 7.0,
        "groups_acknowledged": 6.0,
        "prompts_lost": 1.0,
    }


async def test_a_service_that_is_back_gets_the_policy_before_a_request_for_a_batch(
    client: RewardClient, stub: Stub, clock: Clock
) -> None:
    stub.answers["AnnouncePolicy"] = [reward_pb2.AnnouncePolicyResponse()]
    await client.announce(3, [])
    batch = reward_pb2.TrainBatch(batch_id="b")
    stub.answers["TakeBatch"] = [
        *[UNAVAILABLE] * 3,
        reward_pb2.TakeBatchResponse(batch=batch),
    ]
    stub.answers["GetStatus"] = [*[UNAVAILABLE] * 12, status(), status(policy_version=3)]
    began_s = clock.now_s
    assert (await client.take_batch(4, 3, no_tokens, all_come)).batch_id == "b"
    assert len(stub.requests["AnnouncePolicy"]) == 2
    assert len(stub.requests["TakeBatch"]) == 4
    assert clock.now_s - began_s < 30.0


async def test_an_evaluation_whose_service_has_died_is_asked_for_again_once_it_is_back(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["AnnouncePolicy"] = [reward_pb2.AnnouncePolicyResponse()]
    await client.announce(3, [])
    stub.answers["Evaluate"] = [UNAVAILABLE, reward_pb2.EvaluateResponse(generated_tokens=7)]
    stub.answers["GetStatus"] = [*[UNAVAILABLE] * 4, status(), status(policy_version=3)]
    evaluation = await client.evaluate(3, 0, no_tokens)
    assert evaluation.generated_tokens == 7
    assert len(stub.requests["Evaluate"]) == 2
    assert len(stub.requests["AnnouncePolicy"]) == 2


async def test_an_evaluation_that_ran_for_long_is_asked_for_again_whenever_the_service_dies(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["Evaluate"] = [0.0, 900.0, 900.0, reward_pb2.EvaluateResponse()]
    stub.answers["GetStatus"] = [status(policy_version=3)]
    await client.evaluate(3, 0, no_tokens)
    assert len(stub.requests["Evaluate"]) == 4


async def test_an_evaluation_that_kills_the_service_every_time_is_an_error(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["Evaluate"] = [UNAVAILABLE]
    stub.answers["GetStatus"] = [status(policy_version=3)]
    with pytest.raises(PeerError, match="evaluating version 3"):
        await client.evaluate(3, 0, no_tokens)
    assert len(stub.requests["Evaluate"]) == 6


async def test_a_service_that_stays_away_ends_an_evaluation(
    client: RewardClient, stub: Stub
) -> None:
    stub.answers["Evaluate"] = stub.answers["GetStatus"] = [UNAVAILABLE]
    with pytest.raises(DeadlineError, match="evaluating version 3"):
        await client.evaluate(3, 0, no_tokens)
    assert len(stub.requests["Evaluate"]) == 1
