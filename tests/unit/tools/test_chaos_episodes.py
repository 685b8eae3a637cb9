"""A lost, doubled or wrongly rewarded episode is found; an honest run is not accused."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reward.ledger.schema import open_ledger_file
from tools.chaos.episodes import (
    doubled_episodes,
    failure_rewards,
    lost_episodes,
    lost_rows,
    read_lines,
)

N = 2
JARS = {"A": 3, "B": 4}
GAMES = {("Add", "7"): [{"A": 1, "B": 6}, JARS]}


def line(name: str, end: str = "trained", step: int | None = 1, **other: object) -> dict:
    done = {"end": "done"}
    return {
        "prompt_id": name,
        "end": end,
        "step": step,
        "tokens": [5, 5],
        "scored": 2,
        "episodes": [done, done],
        **other,
    }


def call(jar: str) -> str:
    return f'0 + 2 = 2.\n{{"name": "look", "arguments": {{"jar": "{jar}"}}}}'


def played(text: str = "Answer: 7", reward: float = 1.0, **other: object) -> dict:
    turns = [
        {"text": call("A")},
        {"text": call("B"), "read": "[tool] 3", "parent": 0},
        {"text": text, "read": "[tool] 4", "parent": 1},
    ]
    response = {"text": text, "reward": reward, "turns": turns, "episode_end": "done", **other}
    return {"prompt_id": "a", "prompt": "Add", "ground_truth": "7", "responses": [response]}


@pytest.mark.parametrize(
    ("lines", "trained", "num_lost"),
    [
        pytest.param([line("a"), line("b", "filtered_uniform", None)], {1: {"a": 2}}, 0, id="none"),
        pytest.param([line("a", "dropped_failed", None, tokens=[])], {}, 0, id="a failed group"),
        pytest.param([line("a")], {}, 0, id="a step without a dump accuses nothing"),
        pytest.param([line("a")], {1: {"b": 2}}, 0, id="a step that was trained again"),
        pytest.param([line("a", scored=1)], {1: {"a": 1}}, 0, id="trained without a failure"),
        pytest.param([line("a")], {1: {"a": 1}}, 1, id="left out of its batch"),
        pytest.param([line("a", tokens=[5], scored=1)], {}, 1, id="a sample without an outcome"),
        pytest.param([line("a", "gone", None)], {}, 2, id="an end without a name"),
    ],
)
def test_lost_episodes_are_counted(lines: list, trained: dict, num_lost: int) -> None:
    assert sum(lost_episodes(lines, trained, N).values()) == num_lost


@pytest.mark.parametrize(
    ("trained", "num_doubled"),
    [
        pytest.param({1: {"a": 2}, 2: {"b": 2}}, 0, id="none"),
        pytest.param({1: {"a": 2}, 2: {"a": 1}}, 1, id="in two steps"),
        pytest.param({1: {"c": 2}}, 1, id="more than have a score"),
        pytest.param({1: {"d": 3}}, 1, id="more than the group has, and its line died"),
    ],
)
def test_doubled_episodes_are_counted(trained: dict, num_doubled: int) -> None:
    lines = [line("a"), line("b", step=2), line("c", scored=1)]
    assert sum(doubled_episodes(lines, trained, N).values()) == num_doubled


@pytest.mark.parametrize(
    ("group", "found"),
    [
        pytest.param(played(), "", id="right"),
        pytest.param(played("Answer: 8", -1.0), "", id="wrong"),
        pytest.param(played(reward=0.5), "reward 0.5", id="a number that the game has not"),
        pytest.param(played("Answer: 8", 1.0), "reward 1.0", id="right only for the reward"),
        pytest.param(played("Answer: 8", 0.0), "reward 0.0", id="no agent posts here"),
        pytest.param(played(failure="environment: gone"), "of a failure", id="a failure"),
        pytest.param(played(episode_end=""), "of a failure", id="no end"),
        pytest.param(
            played(turns=[{"text": call("A")}, {"text": "Answer: 7", "read": "", "parent": 0}]),
            "no game",
            id="a call without its result",
        ),
        pytest.param(
            played(
                turns=[
                    {"text": call("A")},
                    {"text": "Answer: 7", "read": "[tool] unavailable", "parent": 0},
                ]
            ),
            "no game",
            id="a failure that the policy read as a result",
        ),
        pytest.param(
            played(
                turns=[
                    {"text": call("Z")},
                    {"text": "Answer: 7", "read": "[tool] KeyError: 'Z'", "parent": 0},
                ]
            ),
            "",
            id="a call that the tool refuses",
        ),
        pytest.param(
            played(
                turns=[
                    {"text": call("A")},
                    {
                        "text": "Answer: 7",
                        "read": "[tool] Error: the call cannot be read: it has no end",
                        "parent": 0,
                    },
                ]
            ),
            "",
            id="a call without its marks",
        ),
    ],
)
def test_rewards_that_the_game_does_not_give_are_found(group: dict, found: str) -> None:
    texts = failure_rewards([], [group], GAMES, may_post=False)
    assert len(texts) == bool(found)
    assert found in "".join(texts)


def test_an_agent_may_post_its_own_reward_for_a_wrong_answer() -> None:
    wrong = played("Answer: 8", 0.0)
    assert failure_rewards([], [wrong], GAMES, may_post=True) == []
    assert failure_rewards([], [played("Answer: 8", 1.0)], GAMES, may_post=True) != []


def test_a_group_with_more_scores_than_ends_has_the_reward_of_a_failure() -> None:
    failed = line("a", episodes=[{"end": "done"}, {"end": None}])
    assert failure_rewards([failed], [], {}, may_post=False) == ["a: 2 scored, 1 ended"]
    assert failure_rewards([{**failed, "scored": 1}], [], {}, may_post=False) == []


def test_a_row_before_a_pending_one_that_nothing_holds_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    database = open_ledger_file(file)
    database.execute("UPDATE ledger SET low_water = 2")
    database.execute("INSERT INTO ended_positions VALUES (3)")
    database.execute("INSERT INTO ended_positions VALUES (9)")  # of a trainer before
    database.execute("INSERT INTO pending VALUES ('data-2', 1, 2, x'00')")
    database.execute("INSERT INTO pending VALUES ('data-5', 2, 5, x'00')")
    database.close()
    assert lost_rows(file) == [4]


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"end": "trained"}\n{"end": "tr\n{"end": "skipped"}\n')
    found = list(read_lines([tmp_path / "a.jsonl", tmp_path / "missing.jsonl"]))
    assert [one["end"] for one in found] == ["trained", "skipped"]
