"""Golden verdicts of verl's exact-match scorer for question answering (Search-R1)."""

from __future__ import annotations

import json

import pytest

from services.reward.grading.scorers.exact_match import compute_score
from sluice.data.scoring import accepted_answers

VERDICTS = [
    ("<answer>Paris</answer>", ["Paris"], 1.0),
    ("<answer> the  PARIS! </answer>", ["Paris"], 1.0),
    ("<answer>Paris</answer>", ["Rome", "a Paris"], 1.0),
    ("<answer>Paris, France</answer>", ["Paris"], 0.0),
    ("<answer>Rome</answer><answer>Paris</answer>", ["Paris"], 1.0),
    ("<answer>Paris</answer><answer>Rome</answer>", ["Paris"], 0.0),
    ("<answer>Rome<answer>Paris</answer>", ["Paris"], 0.0),
    ("<answer>Par\nis</answer>", ["Par is"], 1.0),
    ("<answer>Paris</answer>" + "</answer>" * 9, ["Paris"], 1.0),
    ("<answer>Paris</answer>" + "</answer>" * 10, ["Paris"], 0.25),
    ("<answer>x</answer>" * 10 + "<answer>Paris</answer>", ["Paris"], 0.25),
    ("<answer>Paris</answer> and <answer>Rome", ["Paris"], 1.0),
    ("<answer>another</answer>", ["other"], 0.0),
    ("Paris", ["Paris"], 0.0),
    ("<answer></answer>", ["the"], 1.0),
]


@pytest.mark.parametrize(("response", "accepted", "score"), VERDICTS)
def test_exact_match_verdicts_equal_verls(response: str, accepted: list[str], score: float) -> None:
    assert compute_score(response, json.dumps({"target": accepted})) == score
    assert compute_score(response, json.dumps(accepted)) == score
    if len(accepted) == 1:
        assert compute_score(response, accepted[0]) == score


@pytest.mark.parametrize(
    ("ground_truth", "accepted"),
    [
        ("Paris", ["Paris"]),
        ('["Paris", "Rome"]', ["Paris", "Rome"]),
        ('{"target": "Paris"}', ["Paris"]),
        ('{"target": ["Paris"]}', ["Paris"]),
        ("42", ["42"]),
        ("[1, 2]", ["[1, 2]"]),
        ('{"targets": []}', ['{"targets": []}']),
    ],
)
def test_a_reference_is_text_or_says_in_json_what_it_accepts(
    ground_truth: str, accepted: list[str]
) -> None:
    assert list(accepted_answers(ground_truth)) == accepted
