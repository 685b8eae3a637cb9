"""The reward service as a process: real gRPC, real scorer processes, scripted replicas."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2
from sluice.errors import EngineError, InvalidRequestError, PeerError
from sluice.types import DataProgress, TrainBatch
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import (
    RewardProcess,
    failed_start,
    reward_process,
    turn,
    write_config,
)
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas

SAMPLES = 4
WAIT_S = 20.0

HOSTILE_SCORER = """
import os, re, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    print("noise on standard output")
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "regex":  # holds the interpreter lock in C
        re.match("(a+)+$", "a" * 64 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "allocate":
        return float(len(bytearray(8 << 30)))
    if solution_str == "raise":
        raise KeyError("lost")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "1.0"
    return {"score": 1.0, "acc": 1.0, "pred": solution_str}
"""


def run_tree(tmp_path: Path, contents: list[str], **sections: Any) -> dict[str, Any]:
    """A configuration over a data set of `contents`; `sections` overrides by dotted key."""
    train = write_prompts(tmp_path / "train.parquet", prompt_rows(contents), row_group_size=16)
    tree: dict[str, Any] = {
        "data": {"train_files": str(train), "train_batch_size": 8},
        "actor_rollout_ref": {"rollout": {"n": SAMPLES, "max_num_seqs": 64}},
        "algorithm": {"filter_groups": {"enable": True}},
        "trainer": {"total_epochs": 1},
        "sluice": {"asynchrony": {"max_staleness": 0}},
    }
    for key, value in sections.items():
        section = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    def write(contents: list[str], **sections: Any) -> Path:
        return write_config(tmp_path / "run.yaml", run_tree(tmp_path, contents, **sections))

    return write


def mixed(count: int, first: int = 0) -> list[str]:
    """Prompts whose groups are mixed: two of four samples are right."""
    return [f"answer={first + i} right=2" for i in range(count)]


def cycling(count: int) -> list[str]:
    """Prompts with 0 to 4 right samples in turn: three of five groups are mixed."""
    return [f"answer={i} right={i % 5}" for i in range(count)]


async def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """Poll `condition`, which may be async."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


def identity(batch: TrainBatch) -> list[tuple[str, list[list[int]]]]:
    """What must repeat: prompts in order with all their tokens."""
    return [(g.prompt_id, [r.token_ids.tolist() for r in g.rollouts]) for g in batch.groups]


async def train(service: RewardProcess, replicas: list[ScriptedReplica], steps: int) -> list[Any]:
    """Take, acknowledge and publish `steps` times."""
    batches = []
    await service.announce(0, replicas)
    for step in range(1, steps + 1):
        batch = await service.take(step, step - 1)
        await service.status()
        await service.acknowledge(batch, step)
        await service.status()
        await service.announce(step, replicas)
        batches.append(batch)
    return batches


async def test_a_batch_holds_the_first_mixed_groups_in_the_order_of_issue(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(cycling(40), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
    positions = [int(g.prompt_id.removeprefix("data-")) for g in batch.groups]
    assert positions == [p for p in range(40) if p % 5 in (1, 2, 3)][:8]
    assert all(sorted(s.score for s in g.scores) != [1.0] * SAMPLES for g in batch.groups)
    assert dict(status.prompts_by_end)["trained"] == 8
    assert batch.statistics["train/groups_kept"] == 8
    assert batch.statistics["train/groups_all_wrong"] == 3
    assert batch.statistics["train/groups_all_right"] == 2
    assert batch.progress == DataProgress(13)


async def jitter(replica: ScriptedReplica, call: Call, index: int) -> None:
    await asyncio.sleep(random.random() * 0.01)


async def test_synchronous_batches_repeat_whatever_the_timing(
    configure: Callable[..., Path],
) -> None:
    config = configure(cycling(200))
    runs = []
    for before in (None, jitter):
        replica = ScriptedReplica(before_sample=before)
        async with scripted_replicas(replica), reward_process(config) as service:
            batches = await train(service, [replica], 4)
            status = await service.status()
        runs.append([identity(batch) for batch in batches])
        assert all(b.statistics["train/surplus_discarded"] == 0 for b in batches)
        assert all(b.statistics["train/staleness_max"] == 0 for b in batches)
        assert dict(status.prompts_by_end)["dropped_stale"] == 0
    assert runs[0] == runs[1]


async def test_surplus_kept_groups_are_carried_over_and_none_is_lost(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica(before_sample=jitter)
    config = configure(cycling(400), sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(replica), reward_process(config) as service:

        async def has_surplus() -> bool:
            return bool((await service.status()).groups_kept > 8)

        batches = []
        await service.announce(0, [replica])
        for step in range(1, 9):
            if step == 1:
                await until(has_surplus)
            batches.append(await service.take(step, step - 1))
            await service.acknowledge(batches[-1], step)
            await service.announce(step, [replica])
        status = await service.status()
    ids = [g.prompt_id for b in batches for g in b.groups]
    assert len(ids) == len(set(ids)) == 8 * 8
    assert batches[0].statistics["train/groups_carried_over"] > 0
    assert batches[1].statistics["train/staleness_max"] == 1
    assert max(b.statistics["train/staleness_max"] for b in batches) == 1
    assert sum(b.statistics["train/surplus_discarded"] for b in batches) == 0
    assert dict(status.prompts_by_end)["trained"] == 64
    assert dict(status.prompts_by_end)["dropped_stale"] == 0


async def test_generation_goes_on_while_the_trainer_works(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(100), sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await service.take(1, 0)

        async def next_batch_is_ready() -> bool:
            return bool((await service.status()).groups_kept == 8)

        await until(next_batch_is_ready)
        # Two batches are all that staleness 1 has room for before version 1 is announced.
        assert len(replica.calls) == 16


async def test_only_the_missing_samples_of_a_dead_replica_are_generated_elsewhere(
    configure: Callable[..., Path],
) -> None:
    async def die_after_two(replica: ScriptedReplica, call: Call, index: int) -> None:
        if index == 2:
            raise PeerError(replica.name, "generating", "killed")

    dying = ScriptedReplica(name="dying", before_sample=die_after_two)
    sound = ScriptedReplica(name="sound")
    config = configure(mixed(8))
    async with scripted_replicas(dying, sound), reward_process(config) as service:
        await service.announce(0, [dying, sound])
        batch = await service.take(1, 0)
        status = await service.status()
    assert all(len(g.rollouts) == SAMPLES for g in batch.groups)
    assert dying.calls
    again = [c for c in sound.calls if c.sample_indexes == (2, 3)]
    assert len(again) == len(dying.calls)
    assert status.prompts_submitted == 8


async def test_streams_of_a_replica_that_left_the_fleet_end_and_their_samples_come_elsewhere(
    configure: Callable[..., Path],
) -> None:
    never = asyncio.Event()

    async def hang(replica: ScriptedReplica, call: Call, index: int) -> None:
        await never.wait()

    frozen, sound = ScriptedReplica(name="frozen", before_sample=hang), ScriptedReplica(name="ok")
    config = configure(mixed(8))
    async with scripted_replicas(frozen, sound), reward_process(config) as service:
        await service.announce(0, [frozen])
        await until(lambda: len(frozen.calls) == 8)
        await service.announce(0, [sound])
        batch = await service.take(1, 0)
        await until(lambda: all(call.was_cancelled for call in frozen.calls))
    assert len(batch.groups) == 8
    assert len(sound.calls) == 8


async def test_a_dead_fleet_loses_no_prompt_and_the_run_goes_on_with_a_new_one(
    configure: Callable[..., Path],
) -> None:
    first, second = ScriptedReplica(name="one"), ScriptedReplica(name="two")
    config = configure(mixed(8))
    async with scripted_replicas(first, second), reward_process(config) as service:
        await first.die()
        await service.announce(0, [first])
        await until(lambda: any("one: failed" in line for line in service.log))
        await service.announce(0, [second])
        batch = await service.take(1, 0)
        status = await service.status()
    assert len(batch.groups) == 8
    assert status.prompts_submitted == 8


async def test_a_group_that_fails_too_often_ends_as_failed(configure: Callable[..., Path]) -> None:
    async def break_one(replica: ScriptedReplica, call: Call, index: int) -> None:
        if "answer=3 " in call.content:
            raise EngineError("out of memory")

    replica = ScriptedReplica(before_sample=break_one)
    config = configure(mixed(9), sluice__reward__max_attempts=2, data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
    assert "data-3" not in {g.prompt_id for g in batch.groups}
    assert dict(status.prompts_by_end)["dropped_failed"] == 1


async def test_a_prompt_that_the_engine_refuses_ends_at_once(
    configure: Callable[..., Path],
) -> None:
    async def refuse_one(replica: ScriptedReplica, call: Call, index: int) -> None:
        if "answer=3 " in call.content:
            raise InvalidRequestError("prompt of 900 tokens is over data.max_prompt_length = 512")

    replica = ScriptedReplica(before_sample=refuse_one)
    config = configure(mixed(9), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        await train(service, [replica], 1)
        status = await service.status()
    assert dict(status.prompts_by_end)["dropped_failed"] == 1
    assert sum("answer=3 " in call.content for call in replica.calls) == 1


async def test_a_batch_is_the_same_until_it_is_acknowledged(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(configure(mixed(20))) as service:
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
        again = await service.take(1, 0)
        await service.acknowledge(batch, 1)
        await service.acknowledge(batch, 1)
        status = await service.status()
        assert (again.batch_id, identity(again)) == (batch.batch_id, identity(batch))
        assert dict(status.prompts_by_end)["trained"] == 8
        await service.announce(1, [replica])
        following = await service.take(2, 1)
        assert not {g.prompt_id for g in batch.groups} & {g.prompt_id for g in following.groups}
        with pytest.raises(grpc.aio.AioRpcError, match="is not leased"):
            await service.stub.AcknowledgeBatch(
                reward_pb2.AcknowledgeBatchRequest(batch_id="unknown", step=1), timeout=5
            )


async def test_another_trainer_takes_over_what_is_pending_and_resumes_the_data(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(40), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        first = (await train(service, [replica], 1))[0]
        lost = await service.take(2, 1)
        # Trained, checkpointed after step 1, and then killed with the second batch in hand.
        await service.announce(1, [replica], incarnation="trainer-2", resume_from=first.progress)
        again = await service.take(2, 1)
        status = await service.status()
        assert [g.prompt_id for g in again.groups] == [g.prompt_id for g in lost.groups]
        assert identity(again) == identity(lost)
        assert again.batch_id != lost.batch_id
        assert status.prompts_submitted == 16

    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(1, [replica], resume_from=DataProgress(8, (9, 11)))
        batch = await service.take(2, 1)
    assert [g.prompt_id for g in batch.groups] == [
        f"data-{p}" for p in (8, 10, 12, 13, 14, 15, 16, 17)
    ]


async def test_what_a_scorer_does_never_becomes_a_number(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    scorer = tmp_path / "hostile.py"
    scorer.write_text(HOSTILE_SCORER)
    config = configure(
        mixed(8),
        reward__custom_reward_function__path=str(scorer),
        reward__scorer_pool__timeout_s=1.0,
        reward__scorer_pool__num_workers=2,
    )
    deeds = ["fine", "sleep", "regex", "exit", "allocate", "raise", "nan", "text", "good"]
    items = [reward_pb2.ScoreItem(data_source="mine", response=deed) for deed in deeds]
    async with reward_process(config) as service:
        before = set(service.children())
        answer = await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=60)
        await until(lambda: len(service.children()) == 2)
        assert set(service.children()) != before
    results = dict(zip(deeds, answer.results, strict=True))
    assert results["fine"].score.score == results["good"].score.score == 1.0
    assert results["good"].score.prediction == "good"
    failures = {deed: r.failure.split(":")[0] for deed, r in results.items() if r.failure}
    assert failures == {
        "sleep": "scorer_timeout",
        "regex": "scorer_timeout",
        "exit": "scorer_crash",
        "allocate": "unscorable",
        "raise": "unscorable",
        "nan": "unscorable",
        "text": "unscorable",
    }


async def test_sigterm_ends_the_service_in_order_with_no_child_left(
    configure: Callable[..., Path],
) -> None:
    never = asyncio.Event()

    async def hang(replica: ScriptedReplica, call: Call, index: int) -> None:
        await never.wait()

    replica = ScriptedReplica(before_sample=hang)
    config = configure(mixed(8), sluice__shutdown_grace_s=10.0)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await until(lambda: len(replica.calls) == 8)
        children = service.children()
        taking = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_failure_of(service.take(1, 0), taking))
            await service.status()  # behind the call above on the same connection
            assert await service.stop(10.0) == 0
        assert "shutting down" in str(taking.result())
        await until(lambda: all(call.was_cancelled for call in replica.calls))
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


async def _failure_of(call: Any, outcome: asyncio.Future[Exception]) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        outcome.set_result(error)


async def test_scorer_processes_die_with_a_killed_service_even_in_the_middle_of_an_item(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    scorer = tmp_path / "hostile.py"
    scorer.write_text(HOSTILE_SCORER)
    config = configure(mixed(8), reward__custom_reward_function__path=str(scorer))
    item = reward_pb2.ScoreItem(data_source="mine", response="regex")
    async with reward_process(config) as service:
        children = service.children()
        async with asyncio.TaskGroup() as tasks:
            failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
            call = service.stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=60)
            tasks.create_task(_failure_of(call, failure))
            (child,) = children
            started_s = cpu_seconds(child)
            await until(lambda: cpu_seconds(child) > started_s + 0.1)  # deep in the item
            os.kill(service.process.pid, signal.SIGKILL)
            await service.wait()
        await until(lambda: not Path(f"/proc/{child}").exists())


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_taking_a_batch_without_a_replica_ends_by_its_deadline_and_says_so(
    configure: Callable[..., Path],
) -> None:
    async with reward_process(configure(mixed(8))) as service:
        with pytest.raises(grpc.aio.AioRpcError, match="trainer: announcing a policy") as first:
            await service.take(1, 0, timeout_s=1.0)
        assert first.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.announce(0, [])
        with pytest.raises(grpc.aio.AioRpcError, match="no replica announced"):
            await service.take(1, 0, timeout_s=1.0)
        status = await service.status()
        assert [wait.peer for wait in status.awaited] == ["rollout fleet"]


async def test_an_exhausted_data_set_is_told_with_numbers_and_remedy(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(configure(cycling(20))) as service:
        await train(service, [replica], 1)
        with pytest.raises(grpc.aio.AioRpcError, match=r"exhausted with 4 of 8 .*total_epochs"):
            await service.take(2, 1)
        status = await service.status()
    assert (status.prompts_submitted, status.groups_kept) == (20, 4)


async def test_a_hopeless_yield_ends_the_wait(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure(
        [f"answer={i} right=0" for i in range(60)], algorithm__filter_groups__min_yield_groups=30
    )
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match=r"0.00% of the last 30 groups"):
            await service.take(1, 0)


async def test_clients_get_receipts_then_outcomes_and_duplicates_are_refused(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(20), data__train_batch_size=2, data__train_files=None)
    requests = [
        ("a", "math_dapo", "answer=1 right=2"),
        ("a", "math_dapo", "answer=1 right=2"),
        ("b", "math_dapo", "answer=1 right=0"),
        ("c", "poetry", "answer=1 right=2"),
        ("d", "math_dapo", "answer=1 right=3"),
    ]

    async def messages() -> AsyncIterator[reward_pb2.SubmitPromptsRequest]:
        for prompt_id, source, content in requests:
            yield reward_pb2.SubmitPromptsRequest(
                prompt_id=prompt_id,
                messages=[turn(content)],
                data_source=source,
                ground_truth="1",
            )

    async with scripted_replicas(replica), reward_process(config) as service:
        call = service.stub.SubmitPrompts(messages(), timeout=30)
        events = [await call.read() for _ in requests]
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
        await service.acknowledge(batch, 1)
        outcomes = {}
        while (event := await call.read()) is not grpc.aio.EOF:
            outcomes[event.outcome.prompt_id] = event.outcome
        status = await service.status()
    receipts = [event.receipt for event in events]
    assert [r.HasField("sequence") for r in receipts] == [True, False, True, False, True]
    assert "used before" in receipts[1].refused_because
    assert "custom_reward_function" in receipts[3].refused_because
    assert outcomes["a"].end == reward_pb2.PROMPT_END_TRAINED
    assert (outcomes["a"].step, list(outcomes["a"].rewards)) == (1, [1.0, 1.0, -1.0, -1.0])
    assert outcomes["b"].end == reward_pb2.PROMPT_END_FILTERED_ALL_WRONG
    assert not outcomes["b"].HasField("step")
    assert status.prompts_submitted == 3


async def test_prompts_of_a_client_that_vanished_are_trained_on(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(20), data__train_batch_size=1, data__train_files=None)
    async with scripted_replicas(replica), reward_process(config) as service:
        call = service.stub.SubmitPrompts(timeout=30)
        await call.write(
            reward_pb2.SubmitPromptsRequest(
                prompt_id="orphan",
                messages=[turn("answer=1 right=2")],
                data_source="math_dapo",
                ground_truth="1",
            )
        )
        await call.read()
        call.cancel()
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
    assert [g.prompt_id for g in batch.groups] == ["orphan"]


async def test_evaluation_reports_verls_metrics_before_any_training_group(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    validation = write_prompts(
        tmp_path / "val.parquet", prompt_rows([f"answer={i} right=2" for i in range(10)])
    )
    replica = ScriptedReplica(slots=4)
    config = configure(mixed(40), data__val_files=str(validation))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(3, [replica])
        request = reward_pb2.EvaluateRequest(policy_version=3, n=2, examples=3)
        answer = await service.stub.Evaluate(request, timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match="version 4 is to be evaluated, but 3"):
            await service.stub.Evaluate(reward_pb2.EvaluateRequest(policy_version=4), timeout=30)
    assert answer.metrics["val-core/math_dapo/acc/mean@2"] == 1.0
    assert answer.metrics["val-aux/num_prompts"] == 10
    assert [e.ground_truth for e in answer.examples] == ["0", "1", "2"]
    assert answer.generated_tokens == 10 * 2 * replica.num_tokens


async def test_resident_memory_stays_below_the_bound(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica(num_tokens=1000)
    long = [f"answer={i} right={i % 5} " + "word " * 200 for i in range(20_000)]
    config = configure(long, sluice__asynchrony__max_staleness=1, data__train_batch_size=32)
    async with scripted_replicas(replica), reward_process(config) as service:
        await train(service, [replica], 6)
        assert service.rss_mb() < 250


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.reward_fn_key=origin", "no column 'origin'"),
        ("data.train_files=/nowhere/train.parquet", "no file /nowhere/train.parquet"),
        ("reward.custom_reward_function.path=/nowhere/score.py", "no file /nowhere/score.py"),
        ("data.train_batch=3", "train_batch"),
    ],
)
async def test_bad_input_is_refused_at_the_start_with_one_clear_message(
    configure: Callable[..., Path], override: str, message: str
) -> None:
    code, error = await failed_start(configure(mixed(8)), override)
    assert code != 0
    assert message in error
    assert "Traceback" not in error


async def test_a_port_in_use_is_named(configure: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = await failed_start(configure(mixed(8)), f"sluice.reward.endpoint.port={port}")
    assert code != 0
    assert f"port {port}" in error


async def test_a_broken_custom_function_is_told_with_its_last_line(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    scorer = tmp_path / "broken.py"
    scorer.write_text("import a_module_that_is_not_there\n")
    code, error = await failed_start(
        configure(mixed(8)), f"reward.custom_reward_function.path={scorer}"
    )
    assert code != 0
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in error


async def test_a_row_of_an_unknown_data_source_stops_the_run_and_names_it(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    rows = write_prompts(tmp_path / "odd.parquet", prompt_rows(mixed(8), "poetry"))
    replica = ScriptedReplica()
    config = configure(mixed(8), data__train_files=str(rows))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match=r"'poetry'.*custom_reward_function"):
            await service.take(1, 0)


async def test_a_metric_that_the_scorer_does_not_return_is_told_to_the_trainer(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(8), algorithm__filter_groups__metric="elegance")
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match="no 'elegance'"):
            await service.take(1, 0)


async def test_a_waiting_trainer_gets_the_batch_the_moment_it_is_full(
    configure: Callable[..., Path],
) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(replica: ScriptedReplica, call: Call, index: int) -> None:
        await gate.wait()

    replica = ScriptedReplica(before_sample=wait_for_gate)
    async with scripted_replicas(replica), reward_process(configure(mixed(8))) as service:
        await service.announce(0, [replica])
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(service.take(1, 0))
            await until(lambda: len(replica.calls) == 8)
            assert not taking.done()
            opened_at = time.monotonic()
            gate.set()
        assert len(taking.result().groups) == 8
        assert time.monotonic() - opened_at < WAIT_S
