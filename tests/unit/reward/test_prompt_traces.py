"""A prompt's trace in the reward service: its stages as the loop passes them, and its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from services.reward.generation.request import GroupRequest
from services.reward.group_table import GroupTable
from services.reward.ledger.ledger import PromptLedger
from services.reward.records.traces import PromptTraces, trace_key
from sluice.algorithm.groups.staleness import GroupAges
from sluice.config.run import RunConfig
from sluice.telemetry.tracing import TRACER, SpanName, TraceContext
from tests.support.client_prompt import client_prompt
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit
from tests.support.seen_spans import Kept, traced

MIXED, WRONG = "answer=1 right=1", "answer=1 right=0"
CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)


def config(run_dir: Path) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True, "min_yield_groups": 5}},
        "sluice": {"asynchrony": {"max_staleness": 1}, "run_dir": str(run_dir)},
    }
    return msgspec.convert(tree, RunConfig)


def stages(kept: Kept, prompt_id: str) -> Counter[str]:
    """Names of the spans below a prompt's, whichever of these they are directly below."""
    trace_ids = {
        span.context.trace_id
        for span in kept.named("prompt")
        if span.attributes["sluice.prompt.id"] == prompt_id
    }
    return Counter(span.name for span in kept.spans if span.context.trace_id in trace_ids)


async def test_a_trained_prompt_passes_every_stage_in_one_trace(tmp_path: Path) -> None:
    with traced() as kept:
        async with running_app(config(tmp_path), ScriptedClient()) as app:
            await app.loop.announce("t", 0, [replica("r")], None)
            submit(app, [MIXED])
            batch = await app.loop.batches.take(1, 0, 60)
            reported = app.traces.traceparent("p0")
            app.loop.batches.acknowledge(batch.batch_id, 1)
    (prompt,) = kept.named("prompt")
    assert reported == prompt.context.traceparent
    assert prompt.attributes["sluice.prompt.end"] == "trained"
    assert prompt.attributes["sluice.step"] == 1
    assert prompt.error is None
    assert stages(kept, "p0") == Counter(
        ["prompt", "submit", "admit", "generate", "attempt", "grade", "filter", "wait"]
    )
    assert kept.begun == len(kept.spans) == 8
    direct = {s.name for s in kept.spans if s.parent_id == prompt.context.span_id}
    assert direct == {"submit", "admit", "generate", "grade", "filter", "wait"}


async def test_a_filtered_prompt_never_waits_for_a_batch(tmp_path: Path) -> None:
    with traced() as kept:
        async with running_app(config(tmp_path), ScriptedClient()) as app:
            await app.loop.announce("t", 0, [replica("r")], None)
            submit(app, [WRONG])
            await settled(lambda: not len(app.groups))
    (prompt,) = kept.named("prompt")
    assert prompt.attributes["sluice.prompt.end"] == "filtered_all_wrong"
    assert not kept.named("wait")


async def test_a_prompt_that_starts_again_stays_in_its_trace_and_no_span_stays_open(
    tmp_path: Path,
) -> None:
    may_continue = asyncio.Event()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await may_continue.wait()

    client = ScriptedClient(before_sample=hold)
    with traced() as kept:
        async with running_app(config(tmp_path), client) as app:
            await app.loop.announce("t", 0, [replica("r")], None)
            submit(app, [MIXED])
            await settled(lambda: bool(client.calls))
            await app.loop.announce("another", 0, [replica("r")], None)
            await settled(lambda: len(client.calls) == 2)
        app.traces.close()
    # The end of the loop breaks the second start off, and the prompt waits for a third.
    assert stages(kept, "p0") == Counter(
        ["prompt", "submit", *["admit"] * 3, *["generate"] * 2, *["attempt"] * 2]
    )
    assert kept.begun == len(kept.spans)
    assert {span.error for span in kept.named("generate")} == {"cancelled"}
    (prompt,) = kept.named("prompt")
    assert prompt.attributes["sluice.prompt.end"] == "pending"


async def test_a_clients_trace_is_continued_and_what_it_does_not_record_is_not(
    tmp_path: Path,
) -> None:
    unsampled = TraceContext(7, 8, is_sampled=False)
    with traced() as kept:
        async with running_app(config(tmp_path), ScriptedClient()) as app:
            await app.loop.announce("t", 0, [replica("r")], None)
            with TRACER.within(CALLER):
                submit(app, [WRONG])
            with TRACER.within(unsampled):
                submit(app, [WRONG], first=1)
            await settled(lambda: not len(app.groups))
    (prompt,) = kept.named("prompt")
    assert (prompt.context.trace_id, prompt.parent_id) == (CALLER.trace_id, CALLER.span_id)
    assert {span.context.trace_id for span in kept.spans} == {CALLER.trace_id}


async def test_prompts_that_are_not_chosen_leave_nothing(tmp_path: Path) -> None:
    with traced(ratio=0.0) as kept:
        async with running_app(config(tmp_path), ScriptedClient()) as app:
            await app.loop.announce("t", 0, [replica("r")], None)
            submit(app, [MIXED])
            await app.loop.batches.take(1, 0, 60)
            assert app.traces.traceparent("p0") == ""
    assert kept.begun == 0


def test_a_restarted_service_continues_the_traces_of_its_prompts(
    tmp_path: Path,
) -> None:
    prompt = client_prompt(prompt_id="p")
    with traced() as kept:
        for _ in range(2):
            with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
                is_first = ledger.prompts.get("p") is None
                traces = PromptTraces(trace_key(tmp_path, is_first=is_first))
                groups = GroupTable(ledger, {"": GroupAges(1, 0, "wait")})
                groups.observe(traces.observe)
                if is_first:
                    groups.accept(prompt)
                traces.close()
    first, second = kept.named("prompt")
    assert first.context.trace_id == second.context.trace_id
    assert first.context.span_id != second.context.span_id


def test_runs_have_other_traces_than_runs_before_and_elsewhere(tmp_path: Path) -> None:
    keys = [trace_key(tmp_path / name, is_first=True) for name in ("a", "b", "a")]
    assert len(set(keys)) == 3
    assert trace_key(tmp_path / "a", is_first=False) == keys[2]


def test_without_tracing_nobody_follows(tmp_path: Path) -> None:
    traces = PromptTraces()
    with traces.within("p") as span:
        assert span.context is None
    assert traces.traceparent("p") == ""
    assert TRACER.span(SpanName.GRADE).context is None
    assert not (tmp_path / "reward").exists()
