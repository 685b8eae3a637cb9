"""A stand-alone evaluation stores each finished prompt, and continues with the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import GroupRequest
from services.reward.grading.grader import Grader
from services.reward.groups.validation import FinishedValidation, ValidationOrder, Validator
from services.reward.records.group_log import SampleDumps
from services.reward.records.stored_prompts import BenchmarkFile, PromptStore, open_store
from sluice.data.prompt_files import open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError, EngineError
from sluice.types import SamplingParams
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_app import InlineScorer, ScriptedClient, replica
from tests.support.validation_rows import Rows

SAMPLES, PROMPTS = 2, 20
FIRST = 15
"""Prompts of the first benchmark; the second has the others."""


class Breaking:
    """Breaks the streams of some prompts."""

    def __init__(self, *prompt_ids: str) -> None:
        self.prompt_ids = prompt_ids

    async def __call__(self, _name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id in self.prompt_ids:
            raise EngineError("out of memory")


def store(folder: Path) -> PromptStore:
    return PromptStore(
        [BenchmarkFile(0, folder / "a.jsonl"), BenchmarkFile(FIRST, folder / "b.jsonl")]
    )


async def validated(
    folder: Path | None, client: ScriptedClient | None = None, samples: int = SAMPLES
) -> tuple[FinishedValidation, list[str]]:
    """The result of a validation, and the prompts that it sampled."""
    client = client or ScriptedClient()
    dispatcher = GroupDispatcher(client, ReplicaQueue(1.0), max_attempts=1)
    validator = Validator(
        lambda: Rows(PROMPTS),
        dispatcher,
        Grader(InlineScorer(), None),
        SampleDumps(None, None),
        lambda: 0,
        store=None if folder is None else store(folder),
    )
    await dispatcher.announce([replica("a")])
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1)
    found = await validator.run(ValidationOrder(0, samples, sampling, 0), 60.0)
    return found, [prompt for _, prompt, _ in client.calls]


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


async def test_each_benchmark_gets_its_own_rows_with_responses_and_grades(tmp_path: Path) -> None:
    await validated(tmp_path)
    first, second = lines(tmp_path / "a.jsonl"), lines(tmp_path / "b.jsonl")
    assert sorted(one["position"] for one in first) == list(range(FIRST))
    assert sorted(one["position"] for one in second) == list(range(PROMPTS - FIRST))
    line = next(one for one in second if one["position"] == 0)
    assert line["prompt"] == [{"role": "user", "content": f"answer=1 right=1 number={FIRST}"}]
    assert (line["data_source"], line["ground_truth"]) == ("math_dapo", "1")
    right, wrong = line["samples"]
    assert right["response"].endswith("Answer: 1")
    assert (right["reward"], right["metrics"]["acc"], right["metrics"]["pred"]) == (1.0, 1.0, "1")
    assert (wrong["reward"], wrong["failure"]) == (-1.0, None)
    assert (right["tokens"], right["finish_reason"], right["turns"]) == (8, "stop", 1)


async def test_a_second_start_samples_only_what_was_not_stored(tmp_path: Path) -> None:
    whole, _ = await validated(None)
    await validated(tmp_path)
    stored = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    # As a kill leaves it: some prompts are missing, and the last line is cut short.
    (tmp_path / "a.jsonl").write_text("".join(stored[:10]) + stored[10][:40], encoding="utf-8")
    resumed, sampled = await validated(tmp_path)
    assert len(sampled) == FIRST - 10
    assert resumed.metrics == whole.metrics
    assert len(lines(tmp_path / "a.jsonl")) == FIRST


async def test_a_prompt_with_a_failed_sample_is_sampled_again(tmp_path: Path) -> None:
    whole, _ = await validated(None)
    broken = ScriptedClient(before_sample=Breaking("validation-3"))
    failed, _ = await validated(tmp_path, broken)
    assert failed.metrics["val-aux/num_failed_samples"] == SAMPLES
    resumed, sampled = await validated(tmp_path)
    assert sampled == ["validation-3"]
    assert resumed.metrics == whole.metrics
    assert len(lines(tmp_path / "a.jsonl")) == FIRST


async def test_prompts_with_another_number_of_samples_do_not_count(tmp_path: Path) -> None:
    await validated(tmp_path, samples=1)
    _, sampled = await validated(tmp_path, samples=2)
    assert len(sampled) == PROMPTS


async def test_a_folder_that_cannot_be_written_ends_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a\.jsonl.*start the evaluation again"):
        await validated(tmp_path)


def test_the_benchmarks_of_two_files_begin_where_the_files_do(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one.parquet", "two.parquet")]
    for path, count in zip(paths, (3, 2), strict=True):
        write_prompts(Path(path), prompt_rows([f"{number} + 1 = ?" for number in range(count)]))
    files = open_prompt_files(paths, PromptColumns(), config_key="data.val_files")
    opened = open_store(tmp_path, ["first", "second"], files)
    assert opened._benchmarks == [
        BenchmarkFile(0, tmp_path / "responses" / "first.jsonl"),
        BenchmarkFile(3, tmp_path / "responses" / "second.jsonl"),
    ]
    assert asyncio.run(asyncio.to_thread(opened.load_finished, 1)) == {}
