"""Staleness needs a correction that the loss reads; a correction that nothing reads is refused."""

from __future__ import annotations

import pytest

from sluice.config.check import remarks
from sluice.config.loading.loader import load_config
from sluice.config.problems import Severity
from sluice.config.rules.algorithm import correction_problems

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
STALE = "sluice.asynchrony.max_staleness=1"
ENGINE, WEIGHTS = f"{ACTOR}.use_rollout_log_probs=true", f"{CORRECTION}.rollout_is=token"
NO_ENGINE, NO_WEIGHTS = f"{ACTOR}.use_rollout_log_probs=false", f"{CORRECTION}.rollout_is=null"
BYPASS, REINFORCE = f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"
NORMALISED = f"{CORRECTION}.rollout_is_batch_normalize=true"
REJECTED = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2")


def loss(name: str) -> str:
    return f"{ACTOR}.policy_loss.loss_mode={name}"


def texts(*overrides: str) -> list[str]:
    return [one.text for one in correction_problems(load_config(None, list(overrides)))]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (REINFORCE, BYPASS),
        (STALE, WEIGHTS),
        (STALE, ENGINE),
        (STALE, BYPASS),
        (STALE, loss("bypass_mode")),
        (STALE, BYPASS, REINFORCE, WEIGHTS),
        (STALE, loss("adpo"), ENGINE),
        (STALE, loss("gpg"), WEIGHTS),
        (STALE, loss("gspo"), ENGINE),
        # What was not set is chosen.
        (STALE,),
        (STALE, loss("gspo")),
        (STALE, loss("adpo")),
        (STALE, loss("gpg")),
        (STALE, BYPASS, REINFORCE),
        (STALE, loss("bypass_mode"), REINFORCE),
        (ENGINE, BYPASS, REINFORCE, WEIGHTS, *REJECTED),
        (WEIGHTS, NORMALISED, *REJECTED),
    ],
)
def test_what_is_on_policy_or_corrected_passes(overrides: tuple[str, ...]) -> None:
    assert texts(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "weights", "behavior"),
    [
        ((), "token", False),
        ((loss("adpo"),), None, True),
        ((ENGINE,), None, True),
        ((BYPASS,), None, False),
        ((f"{CORRECTION}.rollout_is=sequence",), "sequence", False),
    ],
)
def test_a_correction_that_was_left_out_is_chosen_by_what_the_loss_reads(
    overrides: tuple[str, ...], weights: str | None, behavior: bool
) -> None:
    chosen = load_config(None, [STALE, *overrides])
    assert chosen.algorithm.rollout_correction.rollout_is == weights
    assert chosen.actor_rollout_ref.actor.use_rollout_log_probs is behavior


def test_without_staleness_no_correction_is_chosen() -> None:
    assert load_config(None, []).algorithm.rollout_correction.rollout_is is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((NO_WEIGHTS,), "use_rollout_log_probs = false and"),
        ((loss("gspo"), NO_WEIGHTS), "rollout_is = null"),
        ((BYPASS, REINFORCE, NO_WEIGHTS), "reinforce, which has no ratio"),
        ((loss("bypass_mode"), REINFORCE, NO_WEIGHTS), "reinforce, which has no ratio"),
        ((loss("adpo"), NO_ENGINE), "adpo, which reads no importance weights"),
        ((loss("adpo"), WEIGHTS), "adpo, which reads no importance weights"),
        ((loss("adpo"), NO_ENGINE, WEIGHTS), "adpo, which reads no importance weights"),
        ((loss("gpg"), NO_WEIGHTS), "gpg, which has no ratio"),
        ((loss("gpg"), ENGINE), "gpg, which has no ratio"),
    ],
)
def test_staleness_that_the_loss_does_not_correct_for_is_refused_with_a_remedy_that_does(
    overrides: tuple[str, ...], named: str
) -> None:
    (found,) = correction_problems(load_config(None, [STALE, *overrides]))
    assert found.severity is Severity.ERROR
    assert "nothing corrects for samples" in found.text
    assert named in found.text
    assert texts(STALE, *overrides, *found.overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((WEIGHTS,), "rollout_is = token"),
        ((NORMALISED,), "rollout_is_batch_normalize = true"),
        (REJECTED, "rollout_rs = token_k1"),
    ],
)
def test_a_correction_of_logprobs_that_are_the_same_is_refused_and_its_remedy_mends_it(
    overrides: tuple[str, ...], key: str
) -> None:
    (found,) = correction_problems(load_config(None, [ENGINE, *overrides]))
    assert found.severity is Severity.ERROR
    assert f"{CORRECTION}.{key} with" in found.text
    assert texts(ENGINE, *overrides, *found.overrides) == []


@pytest.mark.parametrize(
    ("overrides", "means"),
    [
        ((), "truncated importance weights (algorithm.rollout_correction.rollout_is = token"),
        ((loss("adpo"),), "the behavior logprobs in place of the old ones"),
        ((BYPASS,), "the ratios to the behavior policy (bypass mode) correct for it"),
    ],
)
def test_how_stale_samples_are_corrected_for_is_reported_at_the_start(
    overrides: tuple[str, ...], means: str
) -> None:
    reported = "\n".join(one.text for one in remarks(load_config(None, [STALE, *overrides])))
    assert f"samples may lag by at most 1 policy version; {means}" in reported
    assert not any(
        "samples may lag" in one.text for one in remarks(load_config(None, [*overrides]))
    )
