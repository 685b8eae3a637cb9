"""Verdicts of verl's prime_code on outputs, values and responses, by its rules."""

from __future__ import annotations

import json

import pytest

from services.reward.grading.scorers.program_tests import (
    cases_of,
    is_same_output,
    is_same_value,
    program_of,
)
from sluice.errors import DataError

OUTPUTS = [
    ("4\n", "4\n", True),
    ("4", "4\n", True),
    ("  4  \n\n", "4", True),
    ("a b\nc", "a b\nc\n", True),
    ("a \n c", "a\nc", True),
    ("a\n\nb", "a\nb", True),
    ("a\nb", "a\n\nb", True),
    ("a  b", "a b", False),
    ("a\nb", "b\na", False),
    ("YES", "yes", False),
    ("", "", True),
    ("", "4", False),
    ("5", "4", False),
    ("4.0", "4", True),
    ("04", "4", False),
    ("-4", "-4.0", True),
    ("0.333333", "0.333334", True),
    ("0.3333", "0.3334", False),
    ("1000000.1", "1000000.2", True),
    ("1.0 2.0", "1 2", False),
    ("1.0\n2.0", "1\n2", True),
    ("1\n2", "1\n3", False),
    ("1.0\n2.0", "1", False),
    ("inf", "1e400", True),
    ("nan", "1", False),
    ("1", "inf", False),
]


@pytest.mark.parametrize(("output", "expected", "verdict"), OUTPUTS)
def test_outputs_are_compared_as_by_verl(output: str, expected: str, verdict: bool) -> None:
    assert is_same_output(output, expected) is verdict


VALUES = [
    (4, "4", True),
    ([1, 2], "[1, 2]", True),
    ([1, 2], "[[1, 2]]", True),
    ([[1, 2]], "[[[1, 2]]]", True),
    (4, "[4]", True),
    (4.0, "4", True),
    (True, "true", True),
    (None, "null", True),
    ("a", '"a"', True),
    ("a", "a", False),
    ([], "[]", True),
    ([1], "[2]", False),
    ({"1": 2}, '{"1": 2}', True),
    (0.1 + 0.2, "0.3", False),
]


@pytest.mark.parametrize(("value", "expected", "verdict"), VALUES)
def test_values_are_compared_as_by_verl(value: object, expected: str, verdict: bool) -> None:
    assert is_same_value(json.dumps(value), expected) is verdict


RESPONSES = [
    ("print(1)", "print(1)"),
    ("So:\n```python\nprint(1)\n```\nDone.", "\nprint(1)\n"),
    ("```python\na\n```\nbetter\n```python\nb\n```", "\nb\n"),
    ("```python\nprint(1)", "\nprint(1)"),
    ("```\nprint(1)\n```", "\nprint(1)\n"),
    ("```py\nprint(1)\n```", "print(1)\n"),
    ("```print(1)```", "print(1)"),
]


@pytest.mark.parametrize(("response", "program"), RESPONSES)
def test_the_program_is_found_where_verl_finds_it(response: str, program: str) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    "truth",
    ["", "4", "[]", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}',
     '{"inputs": "1", "outputs": "1"}'],
)  # fmt: skip
def test_a_row_without_tests_is_an_error_where_verl_has_a_score(truth: str) -> None:
    with pytest.raises(DataError, match=r"ground_truth.*; write \{"):
        cases_of(truth)
