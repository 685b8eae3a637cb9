"""verl's waves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.strategy import Rounds
from sluice.errors import BatchUnfillableError


def issued(rounds: Rounds, count: int) -> Rounds:
    for _ in range(count):
        rounds = rounds.after_issue()
    return rounds


def to_issue(rounds: Rounds, *, in_flight: int = 0, kept: int = 0, training: int = 0) -> int:
    return rounds.num_to_issue(num_in_flight=in_flight, num_kept=kept, num_in_training=training)


def test_a_wave_is_sampled_whole() -> None:
    rounds = Rounds(8, 4, 0)
    assert to_issue(rounds) == 8
    assert to_issue(issued(rounds, 3), in_flight=3) == 5


def test_no_further_wave_begins_while_a_group_of_the_last_one_runs() -> None:
    assert to_issue(issued(Rounds(8, 4, 0), 8), in_flight=1) == 0


def test_a_wave_that_leaves_the_batch_unfilled_is_followed_by_another() -> None:
    assert to_issue(issued(Rounds(8, 4, 0), 8), kept=3) == 8


def test_a_full_batch_ends_the_waves() -> None:
    rounds = issued(Rounds(8, 4, 0), 8)
    assert to_issue(rounds, kept=4) == 0
    assert rounds.has_ended(0)
    assert not rounds.has_ended(1)


def test_nothing_is_sampled_while_the_batch_is_trained() -> None:
    assert to_issue(Rounds(8, 4, 0).batch_formed(), training=4) == 0


def test_the_tenth_unfilled_wave_of_ten_is_an_error_in_verls_words() -> None:
    rounds = Rounds(2, 4, 10)
    for _ in range(9):
        rounds = issued(rounds, 2)
        assert to_issue(rounds, kept=1) == 2
    with pytest.raises(BatchUnfillableError) as error:
        to_issue(issued(rounds, 2), kept=3)
    assert str(error.value).startswith(
        "num_gen_batches=10 >= max_num_gen_batches=10. Generated too many. Please check if your "
        "data are too difficult. You could also try set max_num_gen_batches=0 to enable endless "
        "trials. (3 of 4 groups were kept"
    )


@pytest.mark.parametrize("unbounded", [0, -1])
def test_no_bound_on_waves_never_ends_in_an_error(unbounded: int) -> None:
    rounds = issued(Rounds(2, 4, unbounded), 2 * 50)
    assert rounds.num_waves == 50
    assert to_issue(rounds, kept=3) == 2


def test_a_prompt_given_back_is_sampled_again_in_the_same_wave() -> None:
    rounds = issued(Rounds(4, 4, 0), 4).after_return()
    assert to_issue(rounds) == 1
    assert rounds.num_waves == 1
    assert not rounds.has_ended(0)


@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.floats(0, 1), max_size=60))
def test_waves_never_exceed_their_size(size: int, batch: int, yields: list[float]) -> None:
    rounds, kept = Rounds(size, batch, 0), 0
    for share in yields:
        wanted = to_issue(rounds, kept=kept)
        assert 0 <= wanted <= size
        rounds = issued(rounds, wanted)
        kept += round(wanted * share)
        if rounds.has_ended(0) and kept >= batch:
            rounds, kept = rounds.batch_formed(), 0
