"""What a replica shows to others: readings and spans."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from services.rollout.engines.protocol import EngineLoad
from services.rollout.generation import GenerationRunner
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from services.rollout.telemetry import load_readings, trace_samples, work_state
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.rpc.client import open_channel, rollout_stub
from sluice.rpc.server import RpcServer
from sluice.telemetry.metric_names import instruments
from sluice.telemetry.tracing import TRACER, Timestamp, TraceContext
from tests.support.causal_lms import reference_model, running_engine, save_config
from tests.support.replica_process import ToyEncoder
from tests.support.scripted_rollout import rollout_of
from tests.support.seen_spans import Kept, traced

SECONDS = {"idle": 2.0, "generating": 1.5}
LOAD = EngineLoad(
    slots=8,
    slots_busy=3,
    queued=2,
    generated_tokens=100,
    unsent_tokens=5,
    running_tokens=7,
    busy_seconds=1.5,
    seconds_by_state=SECONDS,
    version=4,
    weight_digest="digest",
    direct_sent_tokens=20,
    direct_unsent_tokens=3,
    prompt_tokens=50,
    reused_tokens=40,
)


def test_every_counter_of_the_engine_is_shown() -> None:
    found = {(one.instrument.name, *one.labels): one.value for one in load_readings(LOAD)}
    assert found == {
        ("sluice_replica_slots",): 8.0,
        ("sluice_replica_slots_busy",): 3.0,
        ("sluice_replica_queued_samples",): 2.0,
        ("sluice_replica_policy_version",): 4.0,
        ("sluice_replica_generated_tokens_total",): 100.0,
        ("sluice_replica_unsent_tokens_total",): 5.0,
        ("sluice_replica_running_tokens",): 7.0,
        ("sluice_replica_direct_client_tokens_total",): 23.0,
        ("sluice_replica_prompt_tokens_total",): 50.0,
        ("sluice_replica_reused_tokens_total",): 40.0,
        ("sluice_replica_busy_seconds_total",): 1.5,
        ("sluice_replica_seconds_total", "idle"): 2.0,
        ("sluice_replica_seconds_total", "generating"): 1.5,
    }
    assert {name for name, *_ in found} == {one.name for one in instruments()["rollout"]}


def test_time_with_running_samples_is_no_progress_unless_tokens_come() -> None:
    before = work_state(LOAD)
    assert before.has_work
    assert work_state(replace(LOAD, busy_seconds=99.0)) == before
    assert work_state(replace(LOAD, generated_tokens=101)).progress != before.progress
    assert work_state(replace(LOAD, version=5)).progress != before.progress


def test_a_replica_without_weights_serves_version_minus_one() -> None:
    load = EngineLoad(slots=8, version=None, weight_digest="")
    found = {one.instrument.name: one.value for one in load_readings(load)}
    assert found["sluice_replica_policy_version"] == -1.0


CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)
METADATA = (("traceparent", CALLER.traceparent),)
LONG = 100


async def sampled(folder: Path, kept: Kept, *, tokens: int, leaves: bool) -> None:
    """Two samples of one call, which its caller leaves as soon as it has begun, or not."""
    save_config("qwen3", folder)
    async with running_engine(folder, reference_model(folder), max_model_len=128) as engine:
        encoder = ToyEncoder()
        servicer = RolloutServicer(
            ReplicaIdentity("rollout-0", "one"),
            engine,
            encoder,
            GenerationRunner(engine, encoder.decode),
            engine_name="torch",
            max_n=8,
        )
        server = RpcServer(
            [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, grpc_)],
            ["sluice.api.rollout.v1.RolloutService"],
            host="127.0.0.1",
            port=0,
            max_message_bytes=1 << 20,
        )
        await server.start()
        request = rollout_pb2.GenerateRequest(
            request_id="r",
            prompt=common_pb2.PromptInput(text="a"),
            sample_indexes=[0, 2],
            sampling=common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        async with open_channel(server.address, max_message_bytes=1 << 20) as channel:
            call = rollout_stub(channel).Generate(request, timeout=30, metadata=METADATA)
            async for _ in call:
                if leaves:
                    call.cancel()
                    break
            async with asyncio.timeout(30):
                while not kept.named("serve"):
                    await asyncio.sleep(0.001)
        await server.stop(0)


async def test_every_sample_of_a_call_has_a_span_in_the_callers_trace(tmp_path: Path) -> None:
    with traced() as kept:
        await sampled(tmp_path, kept, tokens=3, leaves=False)
    (serve,) = kept.named("serve")
    assert (serve.context.trace_id, serve.parent_id) == (CALLER.trace_id, CALLER.span_id)
    assert serve.attributes == {"sluice.replica": "rollout-0", "sluice.request.id": "r"}
    samples = kept.named("sample")
    assert {s.attributes["sluice.sample.index"] for s in samples} == {0, 2}
    assert {s.parent_id for s in samples} == {serve.context.span_id}
    assert {s.attributes["sluice.tokens"] for s in samples} == {3}
    assert {s.attributes["sluice.sample.finish_reason"] for s in samples} == {"length"}
    assert {s.error for s in kept.spans} == {None}


async def test_a_caller_that_leaves_leaves_no_span_open(tmp_path: Path) -> None:
    with traced() as kept:
        await sampled(tmp_path, kept, tokens=LONG, leaves=True)
    assert kept.begun == len(kept.spans) == 1
    assert [s.error for s in kept.named("serve")] == ["cancelled"]


def test_without_a_recorded_call_samples_have_no_spans() -> None:
    ended = [rollout_of("a", 0, 0, 1, 8)]
    with traced() as kept, TRACER.unrecorded():
        trace_samples(Timestamp.now(), ended)
    trace_samples(Timestamp.now(), ended)
    assert kept.begun == 0
