"""Truncated sampling in training is refused, or asked for and warned of."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import KeySettings, load_config, settings_of
from sluice.config.rules.checks import all_problems
from sluice.config.rules.sampling import sampling_notice

ROLLOUT = "actor_rollout_ref.rollout"
WEIGHTS = "algorithm.rollout_correction.rollout_is=token"
BEHAVIOR = "actor_rollout_ref.actor.use_rollout_log_probs=true"


def notice(*overrides: str) -> str | None:
    return sampling_notice(load_config(None, overrides))


def refused(*overrides: str) -> list[str]:
    config = load_config(None, overrides)
    settings = KeySettings(config, settings_of({}, overrides).by_key())
    found = all_problems(config, settings, shape=None, files=False)
    return [one.text for one in found if one.rule == "truncated-training"]


def test_truncated_training_is_refused_with_field_value_and_remedy() -> None:
    texts = refused(f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5")
    assert [text.partition(" truncates")[0] for text in texts] == [
        f"{ROLLOUT}.top_p = 0.9",
        f"{ROLLOUT}.top_k = 5",
    ]
    assert "set top_p=1 (val_kwargs keep their own)" in texts[0]
    assert "set top_k=-1 (val_kwargs keep their own)" in texts[1]


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ROLLOUT}.top_p=1.0", f"{ROLLOUT}.top_k=-1"),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.val_kwargs.top_k=20"),
        (f"{ROLLOUT}.top_p=0.9", "sluice.sampling.train_truncated=true"),
        (f"{ROLLOUT}.top_p=0.9", "trainer.val_only=true"),
        (f"{ROLLOUT}.top_p=0.9", "sluice.rollout.serves_model_files=true"),
    ],
)
def test_whole_sampling_validation_and_what_was_asked_for_are_not_refused(
    overrides: tuple[str, ...],
) -> None:
    assert refused(*overrides) == []


@pytest.mark.parametrize("correction", [(), (WEIGHTS,), (BEHAVIOR,)])
def test_whole_sampling_needs_no_warning(correction: tuple[str, ...]) -> None:
    assert notice(*correction) is None


def test_truncated_validation_needs_no_warning() -> None:
    assert notice(WEIGHTS, f"{ROLLOUT}.val_kwargs.top_p=0.7") is None


@pytest.mark.parametrize(
    ("cut", "named"), [("top_p=0.9", "top_p = 0.9"), ("top_k=20", "top_k = 20")]
)
@pytest.mark.parametrize(
    ("correction", "effect"),
    [
        (WEIGHTS, "importance weights (rollout_correction.rollout_is = token) are below 1"),
        (BEHAVIOR, "ratio (use_rollout_log_probs = true) starts below 1"),
        ("trainer.seed=0", "old logprobs are recomputed over all tokens"),
    ],
)
def test_truncated_training_sampling_is_reported_with_its_effect_and_a_remedy(
    cut: str, named: str, correction: str, effect: str
) -> None:
    text = notice(f"{ROLLOUT}.{cut}", correction) or ""
    assert named in text
    assert effect in text
    assert "set top_p=1 and top_k=-1" in text


def test_both_cuts_are_named() -> None:
    text = notice(f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5") or ""
    assert "top_p = 0.9 and top_k = 5" in text
