"""Truncated sampling in training is refused, or asked for and warned of."""

from __future__ import annotations

import pytest

from sluice.config.check import remarks
from sluice.config.loading.loader import KeySettings, load_config, settings_of
from sluice.config.rules.checks import all_problems

ROLLOUT = "actor_rollout_ref.rollout"


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
    assert "set it to 1 (val_kwargs keep their own)" in texts[0]
    assert "set it to -1 (val_kwargs keep their own)" in texts[1]


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


def test_what_was_asked_for_is_noted_with_its_effect() -> None:
    asked = load_config(None, [f"{ROLLOUT}.top_p=0.9", "sluice.sampling.train_truncated=true"])
    (note,) = (one for one in remarks(asked) if "truncates sampling" in one.text)
    assert note.text.startswith(f"{ROLLOUT}.top_p = 0.9 truncates")
    assert "ratios and importance weights begin below 1" in note.text
