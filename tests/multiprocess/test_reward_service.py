"""The reward service as a process: its start, its end, its scorer processes and its clients."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import failed_start, reward_process, turn
from tests.support.reward_scenarios import WAIT_S, mixed, train, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas

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


FAULTS = {
    "exit": "scorer_crash",
    "allocate": "unscorable",
    "raise": "unscorable",
    "nan": "unscorable",
    "text": "unscorable",
}
HANGS = {"sleep": "scorer_timeout", "regex": "scorer_timeout"}


# Those that hang have pools of their own: no other sample has to be graded in a second.
@pytest.mark.parametrize(("timeout_s", "failures"), [(1.0, HANGS), (WAIT_S, FAULTS)])
async def test_what_a_scorer_does_never_becomes_a_number(
    tmp_path: Path, configure: Callable[..., Path], timeout_s: float, failures: dict[str, str]
) -> None:
    scorer = tmp_path / "hostile.py"
    scorer.write_text(HOSTILE_SCORER)
    config = configure(
        mixed(8),
        reward__custom_reward_function__path=str(scorer),
        reward__scorer_pool__timeout_s=timeout_s,
        reward__scorer_pool__num_workers=2,
    )
    others = ["fine", "good"] if failures is FAULTS else []
    deeds = [*others[:1], *failures, *others[1:]]
    items = [reward_pb2.ScoreItem(data_source="mine", response=deed) for deed in deeds]
    async with reward_process(config) as service:
        before = set(service.children())
        answer = await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=WAIT_S)
        # What a sample ended is started again for the next one.
        await until(lambda: len(service.children()) == (2 if others else 1))
        assert set(service.children()) != before
    results = dict(zip(deeds, answer.results, strict=True))
    assert {d: r.failure.split(":")[0] for d, r in results.items() if r.failure} == failures
    for deed in others:
        assert results[deed].score.score == 1.0
        assert results[deed].score.prediction == deed


async def test_sigterm_ends_the_service_in_order_with_no_child_left(
    configure: Callable[..., Path],
) -> None:
    never = asyncio.Event()

    async def hang(replica: ScriptedReplica, call: Call, index: int) -> None:
        await never.wait()

    replica = ScriptedReplica(before_sample=hang)
    config = configure(mixed(8))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await until(lambda: len(replica.calls) == 8)
        children = service.children()
        taking = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_failure_of(service.take(1, 0), taking))
            for _ in range(2):  # the second one is behind the call above on the same connection
                await service.status()
            assert await service.stop() == 0
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
            call = service.stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=WAIT_S)
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
        call = service.stub.SubmitPrompts(messages(), timeout=WAIT_S)
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


async def test_an_announcement_is_checked_before_anything_of_it_is_used(
    configure: Callable[..., Path],
) -> None:
    replica = common_pb2.Replica(name="a", instance_id="a-1", address="127.0.0.1:1", slots=1)
    progress = common_pb2.DataProgress(low_water=8, ended_above=[9, 9])
    requests = {
        r"replicas\[0\]": {"replicas": [common_pb2.Replica(name="a")]},
        "replicas": {"replicas": [replica, replica]},
        "resume_from.ended_above: 9 after 9": {"resume_from": progress},
    }
    async with reward_process(configure(mixed(8))) as service:
        for words, fields in requests.items():
            request = reward_pb2.AnnouncePolicyRequest(trainer_instance_id="t", **fields)
            with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                await service.stub.AnnouncePolicy(request, timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await service.status()


async def test_prompts_of_a_client_that_vanished_are_trained_on(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(20), data__train_batch_size=1, data__train_files=None)
    async with scripted_replicas(replica), reward_process(config) as service:
        call = service.stub.SubmitPrompts(timeout=WAIT_S)
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
        answer = await service.stub.Evaluate(request, timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="version 4 is to be validated, but 3"):
            await service.stub.Evaluate(
                reward_pb2.EvaluateRequest(policy_version=4), timeout=WAIT_S
            )
    assert answer.metrics["val-core/math_dapo/acc/mean@2"] == 1.0
    assert answer.metrics["val-aux/num_prompts"] == 10
    shown = [int(e.ground_truth) for e in answer.examples]
    assert len(shown) == 3
    assert shown == sorted(set(shown)), "each of another prompt, in order"
    assert answer.generated_tokens == 10 * 2 * replica.num_tokens


async def test_resident_memory_stays_below_the_bound(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica(num_tokens=1000)
    long = [f"answer={i} right={i % 5} " + "word " * 200 for i in range(20_000)]
    config = configure(long, sluice__asynchrony__max_staleness=1, data__train_batch_size=32)
    async with (
        scripted_replicas(replica),
        reward_process(config, has_own_memory=True) as service,
    ):
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


async def test_a_broken_custom_function_is_reported_with_its_last_line(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    scorer = tmp_path / "broken.py"
    scorer.write_text("import a_module_that_is_not_there\n")
    code, error = await failed_start(
        configure(mixed(8)), f"reward.custom_reward_function.path={scorer}"
    )
    assert code != 0
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in error
