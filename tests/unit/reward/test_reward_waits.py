"""What the service says it waits for, when it gives up, and how seeds are made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.reward.generation.request import for_prompt
from services.reward.groups.loop import LoopStatus, waits_by_kind
from services.reward.groups.settings import training_sampling, validation_sampling
from services.reward.records.failures import YieldGuard
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.errors import BatchUnfillableError
from sluice.types import ChatMessage, Prompt, PromptEnd, PromptOrigin
from tests.support.reward_app import (
    ScriptedClient,
    publish,
    running_app,
    settled,
    submit,
)

IDLE = LoopStatus(
    is_announced=True,
    num_replicas=1,
    leased_step=None,
    batch_asked=False,
    num_generating=0,
    num_grading=0,
    num_kept=0,
    batch_size=8,
    num_batches_in_training=0,
    has_dataset=True,
    is_exhausted=False,
)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"is_announced": False}, [("trainer", "announcing a policy")]),
        ({"num_replicas": 0}, [("rollout fleet", "registering a replica: none is announced")]),
        (
            {"num_generating": 3, "num_grading": 2, "num_kept": 1},
            [
                ("rollout fleet", "generating 3 groups (1 of 8 groups kept)"),
                ("scorer pool", "grading 2 groups"),
            ],
        ),
        ({"num_generating": 3, "outside": "agent"}, [("agent", "working on samples")]),
        (
            {"num_generating": 3, "outside": "agent", "is_untaken": True},
            [("agent", "taking samples")],
        ),
        ({"leased_step": 7}, [("trainer", "training the batch of step 7")]),
        ({"num_kept": 8}, [("trainer", "taking the batch that is ready")]),
        ({"num_batches_in_training": 1}, [("trainer", "announcing the next policy version")]),
        (
            {"is_exhausted": True},
            [("clients", "submitting prompts: the data set is exhausted")],
        ),
        ({"has_dataset": False}, [("clients", "submitting prompts: there is no data set")]),
        ({}, [("data set", "reading prompts")]),
    ],
)
def test_the_nearest_cause_is_named(
    changes: dict[str, object], waits: list[tuple[str, str]]
) -> None:
    facts = replace(IDLE, **changes)  # type: ignore[arg-type]
    assert list(waits_by_kind(facts).values()) == waits


async def test_a_wait_is_as_old_as_its_kind_whatever_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, now = asyncio.Event(), [10.0]

    async def hold(*_: object) -> None:
        await gate.wait()

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("services.reward.groups.loop.time", clock)
    client = ScriptedClient(before_sample=hold)
    async with running_app(RunConfig(), client) as app:
        submit(app, ["answer=1 right=1"])
        await publish(app, client, 0)
        await settled(lambda: app.groups.counts["generating"] == 1)
        (kind, before), *_ = app.loop.waits().items()
        now[0] = 12.0
        submit(app, ["answer=1 right=1"], first=1)
        await settled(lambda: app.groups.counts["generating"] == 2)
        ((kind_after, after),) = app.loop.waits().items()
        assert (kind, 2.0) == (kind_after, after.seconds)
        assert before.phase != after.phase
        gate.set()


def test_the_yield_is_judged_over_a_full_window_of_the_last_groups() -> None:
    guard = YieldGuard(0.25, 4)
    for _ in range(3):
        guard.note_end(PromptEnd.FILTERED_ALL_WRONG, "")
    guard.check_yield()
    guard.note_end(None, "")
    guard.check_yield()
    for _ in range(4):
        guard.note_end(PromptEnd.DROPPED_FAILED, "scorer_crash")
    with pytest.raises(BatchUnfillableError, match=r"0.00% of the last 4.*scorer_crash.*n\)"):
        guard.check_yield()


def test_a_yield_bound_of_zero_never_gives_up() -> None:
    guard = YieldGuard(0.0, 1)
    guard.note_end(PromptEnd.FILTERED_ALL_WRONG, "")
    guard.check_yield()


def prompt(sequence: int, position: int | None) -> Prompt:
    origin = PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET
    return Prompt("p", sequence, (ChatMessage("user", "?"),), "math_dapo", "1", origin, position)


def test_seeds_differ_by_base_seed_stage_and_prompt_and_repeat_after_a_resume() -> None:
    sampling = training_sampling(RolloutConfig(seed=1), 56)

    def seed(base: int, stage: str, made: Prompt) -> int:
        return for_prompt(replace(sampling, seed=base), made, label=stage).seed

    seeds = [
        seed(1, "train", prompt(0, 5)),
        seed(2, "train", prompt(0, 5)),
        seed(1, "validation", prompt(0, 5)),
        seed(1, "train", prompt(0, 6)),
        seed(1, "train", prompt(5, None)),
    ]
    assert len(set(seeds)) == 5
    assert seed(1, "train", prompt(77, 5)) == seeds[0]  # another order of issue, same position
    assert all(0 <= s < 2**63 for s in seeds)
    assert seeds[0] == 6346598583024859642  # a run that another release resumes repeats it, too


def test_validation_takes_its_own_temperature_unless_overridden() -> None:
    rollout = RolloutConfig(temperature=1.0)
    assert validation_sampling(rollout, 56, None).temperature == 0.0
    assert validation_sampling(rollout, 56, 0.7).temperature == 0.7
    assert training_sampling(rollout, 56).max_tokens == 56
