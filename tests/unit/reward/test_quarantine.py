"""Prompts that fail again and again are sampled no more, until somebody releases them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.reward.app import QUARANTINE_FILE, RewardApp, open_run_files
from services.reward.grading.grader import SampleScorer
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.quarantine import Quarantine, read_quarantine
from services.reward.prompts.source import prompt_key
from services.reward.prompts.submissions import SubmissionSession
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, FailureKind, PromptEnd, Scored
from tests.support.client_prompt import client_prompt
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_app,
    settled,
)

CRASHED = Failed(FailureKind.SCORER_CRASH, "exit code 3")
POISON, SOUND = client_prompt("answer=1 right=2 poison"), client_prompt("answer=1 right=2")


def test_a_prompt_is_quarantined_by_the_strike_at_the_bound_and_no_earlier(
    tmp_path: Path,
) -> None:
    path = tmp_path / "reward" / "quarantine.jsonl"
    quarantine = Quarantine(PromptLedger(), 3, path)
    assert [quarantine.add_strike(POISON, CRASHED) for _ in range(2)] == [None, None]
    assert (quarantine.reason(POISON), len(quarantine)) == (None, 0)
    reason = quarantine.add_strike(POISON, CRASHED)
    assert reason is not None
    assert reason.startswith(
        "quarantined: 3 attempts in a row failed, the last: scorer_crash: exit"
    )
    assert str(path) in reason
    assert quarantine.reason(POISON) == reason
    assert quarantine.reason(SOUND) is None
    assert list(read_quarantine(path)) == [prompt_key(POISON)]


def test_an_attempt_that_ends_well_takes_strikes_back() -> None:
    quarantine = Quarantine(PromptLedger(), 2)
    for _ in range(5):
        assert quarantine.add_strike(POISON, CRASHED) is None
        quarantine.clear_strikes(POISON)
    assert len(quarantine) == 0


def test_without_a_bound_no_prompt_is_quarantined() -> None:
    quarantine = Quarantine(PromptLedger(), None)
    assert [quarantine.add_strike(POISON, CRASHED) for _ in range(9)] == [None] * 9


def test_strikes_and_quarantine_survive_the_service(tmp_path: Path) -> None:
    ledger, path = tmp_path / "ledger.sqlite", tmp_path / "quarantine.jsonl"
    for attempt in range(3):
        with PromptLedger(ledger) as opened:
            reason = Quarantine(opened, 3, path).add_strike(POISON, CRASHED)
            assert (reason is not None) == (attempt == 2)
    with PromptLedger(ledger) as opened:
        assert Quarantine(opened, 3, path).reason(POISON) is not None


def test_a_prompt_whose_line_was_deleted_begins_without_strikes(tmp_path: Path) -> None:
    ledger, path = tmp_path / "ledger.sqlite", tmp_path / "quarantine.jsonl"
    with PromptLedger(ledger) as opened:
        quarantine = Quarantine(opened, 2, path)
        for prompt in (POISON, POISON, SOUND, SOUND):
            quarantine.add_strike(prompt, CRASHED)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[1])
    with PromptLedger(ledger) as opened:
        quarantine = Quarantine(opened, 2, path)
        assert quarantine.reason(POISON) is None
        assert quarantine.reason(SOUND) is not None
        assert quarantine.add_strike(POISON, CRASHED) is None


def test_a_line_that_a_killed_service_left_unfinished_is_passed_by(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(b'{"key":"a"}\n{"key":"b')
    assert list(read_quarantine(path)) == ["a"]


def test_lines_of_something_else_are_passed_by_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(b'{"key":"a"}\n{"name":"b"}\n\xff\n{"key":"c"}\n')
    assert list(read_quarantine(path)) == ["a", "c"]
    assert [record.args[1] for record in caplog.records if record.args] == [2, 3]  # type: ignore[index]


@pytest.mark.parametrize("last", [b'{"key":"b"}', b'{"key":"b', b""])
def test_what_is_appended_to_a_file_without_a_last_line_end_is_a_line_of_its_own(
    tmp_path: Path, last: bytes
) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(b'{"key":"a"}\n' + last)
    Quarantine(PromptLedger(), 1, path).add_strike(POISON, CRASHED)
    found = ["a", *(["b"] if last.endswith(b"}") else []), prompt_key(POISON)]
    assert list(read_quarantine(path)) == found
    assert len(Quarantine(PromptLedger(), 1, path)) == len(found)


class CrashingOnPoison(InlineScorer):
    """Loses every sample of a prompt that says poison."""

    async def score(self, items: Any) -> tuple[Scored | Failed, ...]:
        return tuple(map(self._lost_or_scored, items))

    def _lost_or_scored(self, item: ScorerInput) -> Scored | Failed:
        return CRASHED if item.question.endswith("poison") else self._score(item)


def config(run_dir: Path) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "sluice": {
            "run_dir": str(run_dir),
            "reward": {"outcomes": {"max_strikes": 2}, "group_log": False},
        },
    }
    return msgspec.convert(tree, RunConfig)


def _has_ended(app: RewardApp, prompt_id: str) -> bool:
    return app.ledger.ended.get(prompt_id) is not None


async def attempts(
    rules: RunConfig, first: int, count: int, scorer: SampleScorer, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], int, dict[str, float]]:
    """Details of the ends of the same poisonous words sent as `count` prompts, one after the other;
    calls of replicas, statistics."""
    monkeypatch.setattr("tests.support.reward_app.InlineScorer", lambda: scorer)
    client, details = ScriptedClient(), []
    with open_run_files(rules) as files:
        async with running_app(rules, client, files=files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            for number in range(first, first + count):
                name = f"p{number}"
                sent = client_prompt("answer=1 right=2 poison", name)
                app.submissions.submit(sent, SubmissionSession(app.ledger))
                await settled(partial(_has_ended, app, name))
                ended = app.ledger.ended.get(name)
                assert ended is not None
                assert ended.end is PromptEnd.DROPPED_FAILED
                details.append(ended.detail)
            statistics = app.statistics()
    return details, len(client.calls), statistics


async def test_a_poisonous_prompt_costs_a_bounded_number_of_attempts_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, scorer = config(tmp_path), CrashingOnPoison()
    first, num_calls, _ = await attempts(rules, 0, 1, scorer, monkeypatch)
    assert (num_calls, first[0].startswith("4 of 4 samples failed")) == (1, True)
    second, num_calls, statistics = await attempts(rules, 1, 3, scorer, monkeypatch)
    assert num_calls == 1
    assert all(detail.startswith("quarantined: 2 attempts in a row") for detail in second)
    assert statistics["reward/prompts_quarantined"] == 2
    assert statistics["reward/quarantine"] == 1
    assert statistics["reward/prompts_lost"] == 0
    assert len(read_quarantine(tmp_path / QUARANTINE_FILE)) == 1
