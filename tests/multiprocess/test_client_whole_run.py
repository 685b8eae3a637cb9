"""The SDK and its commands against a whole run: replicas by its folder, prompts trained on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    NewPrompt,
    PromptEvent,
    Sampling,
    ScoreItem,
)
from sluice.types import Scored
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, LiveRun, Record, run_to_end

IDS = tuple(f"mine-{number}" for number in range(8))
RUNS_ON = (
    *ENDLESS,
    SLOWLY,
    "trainer.test_freq=-1",
)


class Seen:
    """What clients of the run received."""

    def __init__(self) -> None:
        self.events: list[PromptEvent] = []
        self.printed: dict[str, str] = {}
        self.replicas: list[set[str]] = []
        self.texts: list[str] = []
        self.grades: list[float] = []
        self.versions: list[int] = []
        self.step = 0


@pytest.fixture(scope="module")
def run(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Seen]:
    """A run that clients sample from, submit to and have grade, and that is then stopped."""
    seen = Seen()
    folder = tmp_path_factory.mktemp("clients") / "run"
    return run_to_end(small_assets, folder, RUNS_ON, lambda live: _use(live, seen)), seen


async def _use(run: LiveRun, seen: Seen) -> None:
    await run.until_step(1)
    try:
        async with asyncio.timeout(WAIT_S), AsyncClient.connect(run.run_dir) as client:
            seen.replicas.append({replica.address for replica in await client.replicas()})
            seen.replicas.append({r.address for r in (await client.status()).replicas})
            await _sample_and_grade(client, seen)
            async with aclosing(client.submit([_prompt(name) for name in IDS])) as events:
                seen.events += [event async for event in events]
            seen.step = (await client.status()).step
        await asyncio.to_thread(_commands, run.run_dir, seen)
    finally:
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)


async def _sample_and_grade(client: AsyncClient, seen: Seen) -> None:
    options = GenerateOptions(n=2, sampling=Sampling(max_tokens=8), priority=-1, deadline_s=WAIT_S)
    found = await client.generate([ChatMessage("user", "1 + 1 = ?")], options)
    seen.texts += found.texts
    seen.versions += [span.version for each in found.rollouts for span in each.version_spans]
    for outcome in await client.score([ScoreItem("math_dapo", text, "2") for text in found.texts]):
        assert isinstance(outcome, Scored), outcome
        seen.grades.append(outcome.score)


def _prompt(name: str) -> NewPrompt:
    return NewPrompt(name, (ChatMessage("user", f"{name}: 2 + 2 = ?"),), "math_dapo", "4")


def _commands(run_dir: Path, seen: Seen) -> None:
    rows = [{"data_source": "math_dapo", "ground_truth": "2", "response": t} for t in seen.texts]
    file = run_dir / "responses.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    to_run = ("--run", str(run_dir), "--json")
    options = ("-n", "2", "--max-tokens", "8", "--priority", "-1", "--deadline", str(WAIT_S))
    seen.printed["generate"] = _sluice("generate", "1 + 1 = ?", *options, *to_run)
    seen.printed["score"] = _sluice("score", str(file), *to_run)


def _sluice(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_replicas_of_a_run_are_found_by_its_folder(run: tuple[Record, Seen]) -> None:
    asked, of_status = run[1].replicas
    assert len(asked) == 1
    assert asked == of_status


def test_a_submitted_prompt_is_reported_with_the_step_that_trained_on_it(
    run: tuple[Record, Seen],
) -> None:
    record, seen = run
    receipts = [event.prompt_id for event in seen.events if event.event == "accepted"]
    assert sorted(receipts) == sorted(IDS)
    outcomes = {e.prompt_id: e for e in seen.events if e.event not in ("accepted", "refused")}
    assert set(outcomes) == set(IDS)
    trained = [event for event in outcomes.values() if event.event == "trained"]
    # The rewards are a coin's: that all eight groups are even has a chance of one in 10^7.
    assert trained
    for event in trained:
        assert len(event.rewards) == 4
        assert len(set(event.rewards)) > 1  # groups that are all right or all wrong are filtered
    assert {event.step for event in trained} <= {s["training/global_step"] for s in record.steps}


def test_samples_of_the_run_are_of_a_version_that_it_published(run: tuple[Record, Seen]) -> None:
    _, seen = run
    assert len(seen.texts) == len(seen.grades) == 2
    assert all(0 <= version <= seen.step + 1 for version in seen.versions)


def test_the_commands_sample_and_grade_as_the_sdk_does(run: tuple[Record, Seen]) -> None:
    _, seen = run
    samples = [json.loads(line) for line in seen.printed["generate"].splitlines()]
    assert [sample["index"] for sample in samples] == [0, 1]
    assert all(1 <= len(sample["token_ids"]) <= 8 for sample in samples)
    assert all(len(sample["logprobs"]) == len(sample["token_ids"]) for sample in samples)
    graded = [json.loads(line)["score"] for line in seen.printed["score"].splitlines()]
    assert graded == seen.grades


def test_a_run_that_clients_used_ends_as_any_other(run: tuple[Record, Seen]) -> None:
    record, _ = run
    assert record.end.exit_code == 0, record.end
    assert record.left_running == ()
