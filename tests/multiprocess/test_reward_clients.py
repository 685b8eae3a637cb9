"""What the reward service owes to single callers: own failures, and work ended when they go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.trainer.loop.reward_client import RewardClient
from sluice.api.reward.v1 import reward_pb2
from sluice.errors import ValidationFailedError
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import reward_process, turn
from tests.support.reward_scenarios import WAIT_S, mixed, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas

SCORER_WITH_A_METRIC_FOR_SOME = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = 1.0 if solution_str.endswith("Answer: " + ground_truth) else -1.0
    metrics = {} if data_source == "plain" else {"elegance": score}
    return {"score": score, "acc": score > 0, **metrics}
"""


def prompt(prompt_id: str, data_source: str) -> reward_pb2.SubmitPromptsRequest:
    return reward_pb2.SubmitPromptsRequest(
        prompt_id=prompt_id,
        messages=[turn("answer=1 right=2")],
        data_source=data_source,
        ground_truth="1",
    )


@pytest.fixture
def elegant(tmp_path: Path, configure: Callable[..., Path]) -> Callable[..., Path]:
    """Configures a filter on a metric that the scorer returns for all sources but ``plain``."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER_WITH_A_METRIC_FOR_SOME)

    def write(**sections: Any) -> Path:
        return configure(
            mixed(20),
            algorithm__filter_groups__metric="elegance",
            reward__custom_reward_function__path=str(scorer),
            data__train_batch_size=4,
            **sections,
        )

    return write


async def test_a_clients_prompt_without_the_filters_metric_ends_alone_and_says_why(
    elegant: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(elegant()) as service:
        call = service.stub.SubmitPrompts(timeout=WAIT_S)
        for request in (prompt("odd", "plain"), prompt("sound", "mine")):
            await call.write(request)
            await call.read()
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
        outcome = (await call.read()).outcome
        status = await service.status()
        call.cancel()
    assert (outcome.prompt_id, outcome.end) == ("odd", reward_pb2.PROMPT_END_DROPPED_FAILED)
    assert outcome.detail.startswith("unscorable: ")
    assert "no 'elegance'" in outcome.detail
    assert len(batch.groups) == 4
    assert "sound" in {group.prompt_id for group in batch.groups}
    assert status.statistics["reward/prompts_lost"] == 0


async def test_a_data_set_without_the_filters_metric_stops_the_run_and_names_the_prompt(
    tmp_path: Path, elegant: Callable[..., Path]
) -> None:
    rows = write_prompts(tmp_path / "plain.parquet", prompt_rows(mixed(8), "plain"))
    replica = ScriptedReplica()
    config = elegant(data__train_files=str(rows))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        reported = r"prompt data-\d+ of data source 'plain'.*no 'elegance'"
        with pytest.raises(grpc.aio.AioRpcError, match=reported):
            await service.take(1, 0)


async def test_a_caller_that_leaves_an_evaluation_ends_its_generation(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    never = asyncio.Event()

    async def hang(replica: ScriptedReplica, call: Call, index: int) -> None:
        await never.wait()

    validation = write_prompts(tmp_path / "val.parquet", prompt_rows(mixed(6)))
    replica = ScriptedReplica(before_sample=hang)
    config = configure(mixed(8), data__train_files=None, data__val_files=str(validation))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        call = service.stub.Evaluate(reward_pb2.EvaluateRequest(policy_version=0), timeout=WAIT_S)
        await until(lambda: len(replica.calls) == 6)
        call.cancel()
        await until(lambda: all(call.was_cancelled for call in replica.calls))
        replica.before_sample = None
        request = reward_pb2.EvaluateRequest(policy_version=0)
        answer = await service.stub.Evaluate(request, timeout=WAIT_S)
    assert answer.metrics["val-aux/num_prompts"] == 6
    assert answer.metrics["val-aux/num_failed_samples"] == 0


async def test_a_validation_that_fails_is_not_asked_for_again_and_says_why(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def compute_score(*args, **kwargs):\n    raise ValueError('no grade')\n")
    validation = write_prompts(tmp_path / "val.parquet", prompt_rows(mixed(6)))
    replica = ScriptedReplica()
    config = configure(
        mixed(8),
        data__train_files=None,
        data__val_files=str(validation),
        reward__custom_reward_function={"path": str(scorer)},
    )
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        client = RewardClient(service.stub, "trainer-1", batch_timeout_s=WAIT_S)
        with pytest.raises(
            ValidationFailedError, match=r"version 0: 6 of 6 .*ValueError: no grade"
        ):
            await client.evaluate(0, 0, lambda: 0)
    assert len(replica.calls) == 6
