"""Limits of conversations with tools against verl 0.9.1's loop, run with a scripted policy
(`verl/experimental/agent_loop/tool_agent_loop.py`), and the metrics of such a batch
(`verl/trainer/ppo/metric_utils.py`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from sluice.algorithm.batch_metrics import BatchRows, batch_metrics
from sluice.algorithm.episode_rules import EpisodeCounts, EpisodeRules, Observation, truncate_text
from sluice.types import Answer, ChatMessage, FinishReason

CUT = [
    ("left", 5, "c \u00e9bb\u65e5b\u00e9", "(truncated)...bb\u65e5b\u00e9"),
    ("left", 8, "\u00e9aaaabbba\u00e9\u00e9", "(truncated)...aabbba\u00e9\u00e9"),
    ("left", 8, " cac\u00e9c\n\u00e9\na \n\u65e5ca", "(truncated)...\u00e9\na \n\u65e5ca"),
    ("right", 12, "\u00e9c\n\u65e5  \nccc c \n\u00e9c\n", "\u00e9c\n\u65e5  \nccc c...(truncated)"),
    (
        "right",
        17,
        "c\u00e9\u00e9ba\u00e9\n\u65e5b \u00e9\ncba",
        "c\u00e9\u00e9ba\u00e9\n\u65e5b \u00e9\ncba",
    ),
    ("right", 2, "  cacc\nc\u00e9 cb\u00e9\u00e9", "  ...(truncated)"),
    (
        "middle",
        13,
        "\u00e9 \u00e9ba a\n\u00e9c\nbb \u65e5b",
        "\u00e9 \u00e9ba ...(truncated)...\nbb \u65e5b",
    ),
    ("middle", 2, "cc  \n\u65e5baac\u00e9", "c...(truncated)...\u00e9"),
]

ANSWERS = [
    # max_user_turns, max_assistant_turns, the answer without a call; answers, verl's num_turns
    (None, 7, 6, 6, 12),
    (1, 4, 9, 2, 4),
    (1, None, 3, 2, 4),
    (1, 1, 6, 1, 2),
    (2, 2, 9, 2, 4),
    (2, 7, 9, 3, 6),
    (3, 4, 6, 4, 8),
    (3, 4, 3, 3, 6),
    (3, None, 6, 4, 8),
    (5, 7, 9, 6, 12),
    (None, None, 9, 9, 18),
    (None, 1, 3, 1, 2),
]


@pytest.mark.parametrize(("side", "most", "text", "kept"), CUT)
def test_a_long_text_of_a_tool_is_cut_where_verl_cuts_it(
    side: Literal["left", "middle", "right"], most: int, text: str, kept: str
) -> None:
    rules = EpisodeRules(100, max_tool_response_length=most, truncate_side=side)
    assert truncate_text(text, rules) == kept


def answers_of(user_turns: int | None, assistant_turns: int | None, last: int) -> int:
    """Return the answers of an episode whose policy calls a tool in all before the last."""
    rules = EpisodeRules(100, max_user_turns=user_turns, max_assistant_turns=assistant_turns)
    counts, number = EpisodeCounts(rules), 0
    while True:
        number += 1
        counts.count_answer(Answer(""))
        seen = Observation((ChatMessage("tool", "6"),), done=number == last)
        if counts.end(FinishReason.STOP, seen) is not None:
            return number


@pytest.mark.parametrize(("users", "assistants", "last", "answers", "num_turns"), ANSWERS)
def test_an_episode_with_tools_has_as_many_turns_as_in_verl(
    users: int | None, assistants: int | None, last: int, answers: int, num_turns: int
) -> None:
    found = answers_of(users, assistants, last)
    one = np.array([1])
    rows = BatchRows(np.array([1.0]), one, one, one, np.array([found]), one, one)
    metrics = batch_metrics(rows, max_prompt_tokens=9, max_response_tokens=9)
    assert (found, metrics["num_turns/mean"]) == (answers, num_turns)


def test_lengths_of_an_episode_count_what_it_read() -> None:
    # Three rows of compute_data_metrics: response masks 1101, 11 and 110111, 6 columns.
    rows = BatchRows(
        rewards=np.array([1.0, 0.0, 0.5]),
        prompt_lengths=np.array([3, 2, 3]),
        response_lengths=np.array([3, 2, 5]),
        read_lengths=np.array([1, 0, 1]),
        turns=np.array([2, 1, 2]),
        roots=np.array([1, 1, 1]),
        longest_paths=np.array([4, 2, 6]),
    )
    found = batch_metrics(rows, max_prompt_tokens=3, max_response_tokens=6)
    assert found["response_length/mean"] == 4.0
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response_length_non_aborted/min"] == 2.0
    assert found["prompt_length/clip_ratio"] == pytest.approx(2 / 3)
    assert found["num_turns/mean"] == pytest.approx(10 / 3)
