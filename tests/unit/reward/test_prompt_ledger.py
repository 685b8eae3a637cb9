"""Every accepted prompt is pending or ended in exactly one way; the sums add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.ledger.ledger import PromptLedger
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import ChatMessage, DataProgress, Prompt, PromptEnd, PromptOrigin


def prompt(ledger: PromptLedger, position: int | None, name: str | None = None) -> Prompt:
    origin = PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET
    made = Prompt(
        name or f"data-{position}",
        ledger.next_sequence(),
        (ChatMessage("user", "?"),),
        "math_dapo",
        "1",
        origin,
        position,
    )
    ledger.accept(made)
    return made


def row(position: int) -> Prompt:
    return Prompt(f"data-{position}", 0, (), "math_dapo", "1", PromptOrigin.DATASET, position)


@given(st.lists(st.tuples(st.integers(0, 19), st.sampled_from(PromptEnd))))
def test_submitted_is_ended_plus_pending_after_every_step(
    steps: list[tuple[int, PromptEnd]],
) -> None:
    ledger = PromptLedger()
    for position in range(20):
        prompt(ledger, position)
    ended: set[int] = set()
    for position, end in steps:
        if position in ended:
            with pytest.raises(NotFoundError):
                ledger.end(f"data-{position}", end)
        else:
            ledger.end(f"data-{position}", end)
            ended.add(position)
        assert ledger.num_submitted == 20
        assert sum(ledger.by_end.values()) + ledger.num_pending == 20
        assert ledger.num_pending == len(ledger.pending())
        progress = ledger.progress()
        covered = {*range(progress.low_water), *progress.ended_above}
        assert covered == ended
        assert progress.low_water not in ended


def test_a_prompt_ends_once() -> None:
    ledger = PromptLedger()
    prompt(ledger, 0)
    ledger.end("data-0", PromptEnd.TRAINED)
    with pytest.raises(NotFoundError):
        ledger.end("data-0", PromptEnd.DROPPED_STALE)


def test_a_clients_id_is_used_once_even_after_its_end() -> None:
    ledger = PromptLedger()
    prompt(ledger, None, "mine")
    ledger.end("mine", PromptEnd.TRAINED)
    with pytest.raises(InvalidRequestError, match="'mine' was used before"):
        prompt(ledger, None, "mine")


def test_a_batchs_progress_counts_its_own_prompts_as_ended() -> None:
    ledger = PromptLedger()
    for position in range(4):
        prompt(ledger, position)
    ledger.end("data-1", PromptEnd.FILTERED_ALL_WRONG)
    assert ledger.progress([row(0), row(3)]) == DataProgress(2, (3,))
    assert ledger.progress() == DataProgress(0, (1,))


def test_the_progress_of_a_prompt_that_a_later_checkpoint_has_ended_is_that_checkpoints() -> None:
    ledger = PromptLedger()
    for position in range(3):
        prompt(ledger, position)
    assert ledger.restart_data(DataProgress(5, (7,))) == DataProgress(5, (7,))
    assert ledger.progress([row(1), row(8)]) == DataProgress(5, (7, 8))


def test_going_back_to_a_checkpoint_draws_neither_ended_nor_pending_positions() -> None:
    ledger = PromptLedger()
    for position in range(6):
        prompt(ledger, position)
    for position in range(5):
        ledger.end(f"data-{position}", PromptEnd.TRAINED)
    assert ledger.restart_data(DataProgress(2, (3,))) == DataProgress(2, (3, 5))
    assert ledger.progress() == DataProgress(2, (3,))
