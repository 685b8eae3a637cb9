"""One trace from prompt to gradient, through the processes of a real run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client import AsyncClient, ChatMessage, GenerateOptions, NewPrompt, Sampling
from sluice.telemetry.tracing import TraceContext
from tests.support.seen_spans import Collector, ReadSpan, collector, spans_in, tree
from tests.support.small_run import ENDLESS, SAMPLES, SLOWLY, Assets, LiveRun, Record, run_to_end

CLIENT = TraceContext(0x11AA, 0x11, is_sampled=True)
SILENT_CLIENT = TraceContext(0x22BB, 0x22, is_sampled=False)
SAMPLER = TraceContext(0x33CC, 0x33, is_sampled=True)
BELOW_PROMPT = {
    **{name: {"prompt"} for name in ("admit", "generate", "grade", "filter", "wait")},
    **{name: {"prompt"} for name in ("train step", "publish")},
    "attempt": {"generate"},
    "serve": {"attempt"},
    "sample": {"serve"},
}
SERVICES = {
    **dict.fromkeys(("prompt", "draw", "submit", "admit", "generate"), "sluice-reward"),
    **dict.fromkeys(("attempt", "grade", "filter", "wait"), "sluice-reward"),
    **dict.fromkeys(("serve", "sample"), "sluice-rollout"),
    **dict.fromkeys(("train step", "publish"), "sluice-trainer"),
}


@dataclass
class Traced:
    """A run that was traced."""

    record: Record
    spans: Sequence[ReadSpan]
    collected: Collector | None
    trained: dict[str, int] = field(default_factory=dict)  # step by client's prompt
    silent: list[str] = field(default_factory=list)

    def of_prompt(self, prompt_id: str) -> list[ReadSpan]:
        """All spans of the trace of one prompt."""
        (root,) = (
            span
            for span in self.spans
            if span.name == "prompt" and span.attributes["sluice.prompt.id"] == prompt_id
        )
        below = [root]
        for span in below:
            below += [s for s in self.spans if s.parent == span.id and s.trace == span.trace]
        return below


@pytest.fixture(scope="module")
def run(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run with clients, into a file, and to a collector as well where the package is there."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    overrides = [
        *ENDLESS,
        SLOWLY,
        "trainer.test_freq=2",
        "sluice.telemetry.traces.file=traces.jsonl",
        "sluice.telemetry.traces.sample_ratio=1",
    ]
    trained: dict[str, int] = {}
    silent: list[str] = []

    async def use(live: LiveRun) -> None:
        await live.until_step(1)
        await sample(live)
        silent.extend(await submitted(live, "silent", SILENT_CLIENT, 1))
        batch = 0
        while not trained:
            trained.update(await submitted(live, f"client-{batch}", CLIENT, 4))
            batch += 1
        await live.until_step(max(trained.values()) + 1)
        await live.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    if find_spec("opentelemetry") is None:
        record, collected = run_to_end(small_assets, folder, overrides, use), None
    else:
        with collector() as collected:
            overrides.append(f"sluice.telemetry.traces.endpoint={collected.address}")
            record = run_to_end(small_assets, folder, overrides, use)
    assert record.end.exit_code == 0, record.lines
    return Traced(record, spans_in(folder / "traces.jsonl"), collected, trained, silent)


async def submitted(live: LiveRun, name: str, caller: TraceContext, count: int) -> dict[str, int]:
    """Submits prompts and waits for their ends; the step of each that was trained."""
    prompts = [
        NewPrompt(
            prompt_id=f"{name}-{number}",
            messages=(ChatMessage("user", f"{number} = ?"),),
            data_source="math_dapo",
            ground_truth="1",
        )
        for number in range(count)
    ]
    ended = dict[str, int]()
    async with AsyncClient.connect(live.run_dir) as client:
        async for event in client.submit(prompts, traceparent=caller.traceparent):
            if event.event not in ("accepted", "refused"):
                ended[event.prompt_id] = event.step or 0
    assert set(ended) == {prompt.prompt_id for prompt in prompts}
    return {key: step for key, step in ended.items() if step} if caller.is_sampled else ended


async def sample(live: LiveRun) -> None:
    """Samples as a client of a replica."""
    options = GenerateOptions(
        sampling=Sampling(max_tokens=2), traceparent=SAMPLER.traceparent, request_id="a-client's"
    )
    async with AsyncClient.connect(live.run_dir) as client:
        await client.generate("1 + 1 = ?", options)


def trained_rows(run: Traced) -> list[ReadSpan]:
    """Spans of data-set prompts that were trained."""
    return [
        span
        for span in run.spans
        if span.name == "prompt"
        and span.attributes["sluice.prompt.origin"] == "dataset"
        and span.attributes["sluice.prompt.end"] == "trained"
    ]


def test_a_prompt_of_the_data_set_is_followed_through_every_span_to_its_gradient(
    run: Traced,
) -> None:
    prompts = trained_rows(run)
    assert prompts
    for prompt in prompts:
        spans = run.of_prompt(prompt.attributes["sluice.prompt.id"])
        assert tree(spans) == {"prompt": {""}, "draw": {"prompt"}, **BELOW_PROMPT}
        assert {span.trace for span in spans} == {prompt.trace}
        assert {span.name: span.service for span in spans}.items() <= SERVICES.items()
        samples = [span for span in spans if span.name == "sample"]
        assert {s.attributes["sluice.sample.index"] for s in samples} == set(range(SAMPLES))
        if [span.name for span in spans].count("admit") == 1:  # it never had to start again
            assert len(spans) == 11 + SAMPLES
        assert {span.error for span in spans} == {None}


def test_nothing_else_is_in_a_prompts_trace(run: Traced) -> None:
    for prompt in trained_rows(run):
        in_trace = [span for span in run.spans if span.trace == prompt.trace]
        assert len(in_trace) == len(run.of_prompt(prompt.attributes["sluice.prompt.id"]))


def test_a_clients_own_trace_continues_to_the_gradient(run: Traced) -> None:
    for prompt_id, step in run.trained.items():
        spans = run.of_prompt(prompt_id)
        parents = {"prompt": {f"{CLIENT.span_id:016x}"}, "submit": {"prompt"}, **BELOW_PROMPT}
        assert tree(spans) == parents
        assert {span.trace for span in spans} == {f"{CLIENT.trace_id:032x}"}
        (prompt,) = (span for span in spans if span.name == "prompt")
        assert prompt.attributes["sluice.step"] == step


def test_what_a_client_does_not_record_is_recorded_nowhere(run: Traced) -> None:
    assert run.silent
    assert f"{SILENT_CLIENT.trace_id:032x}" not in {span.trace for span in run.spans}
    reported = {span.attributes.get("sluice.prompt.id") for span in run.spans}
    assert not reported & set(run.silent)


def test_a_clients_samples_are_in_its_trace(run: Traced) -> None:
    spans = [span for span in run.spans if span.trace == f"{SAMPLER.trace_id:032x}"]
    assert tree(spans) == {"serve": {f"{SAMPLER.span_id:016x}"}, "sample": {"serve"}}


def test_the_stages_of_a_prompt_begin_in_their_order(run: Traced) -> None:
    order = ["prompt", "admit", "generate", "attempt", "serve", "sample", "grade", "filter"]
    order += ["wait", "train step", "publish"]
    for prompt in trained_rows(run):
        spans = run.of_prompt(prompt.attributes["sluice.prompt.id"])
        first = {name: min(s.start_ns for s in spans if s.name == name) for name in order}
        assert sorted(order, key=lambda name: (first[name], order.index(name))) == order


def test_a_step_links_to_the_prompts_that_it_trained_and_they_to_it(run: Traced) -> None:
    steps = {s.attributes["sluice.step"]: s for s in run.spans if s.name == "step"}
    trains = {s.id: s for s in run.spans if s.name in ("train step", "publish")}
    for prompt in trained_rows(run):
        step = steps[prompt.attributes["sluice.step"]]
        assert (prompt.trace, prompt.id) in step.links
        for span in run.of_prompt(prompt.attributes["sluice.prompt.id"]):
            if span.name in ("train step", "publish"):
                ((trace, linked),) = span.links
                assert trace == step.trace
                assert trains[linked].parent == step.id


def test_a_publication_is_in_its_steps_trace_as_far_as_the_replicas(run: Traced) -> None:
    step = next(s for s in run.spans if s.name == "step" and s.attributes["sluice.step"] == 2)
    found = tree(span for span in run.spans if span.trace == step.trace)
    assert found == {
        "step": {""},
        **{name: {"step"} for name in ("take batch", "train step", "publish", "evaluate")},
        **{name: {"publish"} for name in ("receive weights", "swap weights")},
    }


def test_a_validation_leaves_no_spans_of_its_samples(run: Traced) -> None:
    ids = {span.id for span in run.spans}
    known = {f"{SAMPLER.span_id:016x}"}
    assert all(s.parent in ids | known for s in run.spans if s.name == "serve")
    assert "evaluate" in {span.name for span in run.spans}


def lost(run: Traced, destination: str) -> int:
    """Spans that processes had no time left for at their ends, as they logged."""
    reported = re.compile(rf"(\d+) spans never reached \S*{re.escape(destination)},")
    found = (reported.search(line) for _, line in run.record.lines)
    return sum(int(match[1]) for match in found if match)


def test_a_collector_gets_the_same_spans_as_the_file_but_for_those_logged_as_lost(
    run: Traced,
) -> None:
    if run.collected is None:
        pytest.skip("needs the extra 'traces'")
    arrived = {(span.span_id.hex(), span.name) for span in run.collected.spans()}
    written = {(span.id, span.name) for span in run.spans}
    assert len(written - arrived) <= lost(run, run.collected.address)
    assert len(arrived - written) <= lost(run, "traces.jsonl")
    assert len(arrived & written) > len(written) // 2


def test_no_span_is_lost_while_the_run_trains(run: Traced) -> None:
    assert not [line for _, line in run.record.lines if "spans do not reach" in line]


def test_a_run_whose_collector_is_dead_trains_all_the_same(
    small_assets: Assets, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    dead = "sluice.telemetry.traces.endpoint=http://127.0.0.1:1"
    processes = ("trainer", "reward", "rollout-0")

    async def outlast_an_export(live: LiveRun) -> None:
        await live.until_step(3)

        async def reported() -> bool:
            logs = [live.run_dir / "logs" / f"{process}.log" for process in processes]
            return all("spans do not reach" in log.read_text(encoding="utf-8") for log in logs)

        await live.until(reported, "an export that failed in every process")
        await live.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    record = run_to_end(small_assets, tmp_path / "run", [*ENDLESS, SLOWLY, dead], outlast_an_export)
    assert record.end.exit_code == 0, record.lines
    assert [row["training/global_step"] for row in record.steps][:3] == [1, 2, 3]
    assert record.accounts["prompts_lost"] == 0
    for process in processes:
        log = record.log(process)
        assert log.count("spans do not reach http://127.0.0.1:1") == 1  # logged once
        assert log.count("spans never reached http://127.0.0.1:1") == 1
