"""A step's trace, and the step in the traces of the prompts that it trains."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.trainer.loop.step_trace import step_trace
from services.trainer.loop.train_loop import TrainLoop
from sluice.telemetry.tracing import TRACER, SpanName, TraceContext
from sluice.types import TrainBatch
from tests.support.loop_world import WAIT_S, World, batch_of, run, until
from tests.support.seen_spans import traced

PROMPTS = [TraceContext(step, 0xDEF, is_sampled=True) for step in range(9)]


def traced_batch(step: int) -> TrainBatch:
    batch = batch_of(step)
    groups = tuple(replace(g, traceparent=PROMPTS[step].traceparent) for g in batch.groups)
    return replace(batch, groups=groups)


@pytest.fixture
def world() -> World:
    world = World(steps=2)
    world.register("a")
    world.batch_of = traced_batch
    return world


def loop(world: World) -> TrainLoop:
    return world.loop(save_freq=1, test_freq=1, validates=True)


async def test_a_step_has_a_trace_that_links_to_its_prompts_and_they_to_it(world: World) -> None:
    with traced() as kept:
        await run(loop(world))
    assert kept.begun == len(kept.spans)
    first, second = kept.named("step")
    assert [first.attributes["sluice.step"], second.attributes["sluice.step"]] == [1, 2]
    assert first.links == (PROMPTS[1],)
    below = {s.name for s in kept.spans if s.parent_id == first.context.span_id}
    assert below == {"take batch", "train step", "publish", "save", "evaluate"}
    in_prompt = [s for s in kept.spans if s.context.trace_id == PROMPTS[1].trace_id]
    assert [s.name for s in in_prompt] == ["train step", "publish"]
    for copy in in_prompt:
        (own,) = (s for s in kept.named(copy.name) if s.context.trace_id == first.context.trace_id)
        assert copy.parent_id == PROMPTS[1].span_id
        assert copy.links == (own.context,)
        assert (copy.start_ns, copy.duration_ns) == (own.start_ns, own.duration_ns)
        assert copy.attributes == {"sluice.step": 1, "sluice.prompt.id": "p"}


async def test_a_run_that_is_not_traced_takes_no_notice_of_the_prompts(world: World) -> None:
    await run(loop(world))
    with step_trace(1) as trace:
        trace.link_prompts(traced_batch(1))
        with trace.span(SpanName.TRAIN_STEP):
            assert TRACER.current() is None


async def test_prompts_that_are_not_recorded_are_not_linked() -> None:
    with traced() as kept, step_trace(1) as trace:
        trace.link_prompts(batch_of(1))
        with trace.span(SpanName.TRAIN_STEP):
            pass
    assert [(s.name, s.links) for s in kept.spans] == [("train step", ()), ("step", ())]


async def test_a_step_that_is_broken_off_leaves_no_span_open(world: World) -> None:
    world.holds["train 1"] = asyncio.Event()
    with traced() as kept:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(WAIT_S):
            running = tasks.create_task(loop(world).run())
            await until(lambda: "train 1" in world.events)
            running.cancel()
    assert kept.begun == len(kept.spans)
    assert {s.error for s in kept.named("train step")} == {"cancelled"}
    assert {s.context.trace_id for s in kept.named("train step")} >= {PROMPTS[1].trace_id}
