"""A lost, doubled or wrongly rewarded episode is found; an honest run is not accused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from tools.chaos.episodes import (
    doubled_episodes,
    failure_rewards,
    judge_episodes,
    lost_episodes,
    read_games,
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
        pytest.param([line("a")], {1: {"a": 0}}, 0, id="samples that nothing shows"),
        pytest.param([line("a", scored=1)], {1: {"a": 1}}, 0, id="trained without a failure"),
        pytest.param([line("a")], {1: {"a": 1}}, 1, id="left out of its batch"),
        pytest.param([line("a"), line("a", scored=1)], {1: {"a": 1}}, 0, id="trained again"),
        pytest.param([line("a", scored=1), line("a")], {1: {"a": 1}}, 1, id="left out then"),
        pytest.param([line("a", tokens=[5], scored=1)], {}, 1, id="a sample without an outcome"),
        pytest.param([line("a", "gone", None)], {}, 2, id="an end without a name"),
        pytest.param(
            *([line("a", "filtered_uniform", None, tokens=[])], {}, 2), id="filtered, not graded"
        ),
    ],
)
def test_lost_episodes_are_counted(lines: list, trained: dict, num_lost: int) -> None:
    assert sum(lost_episodes(lines, trained, N).values()) == num_lost


@pytest.mark.parametrize(
    ("trained", "num_doubled"),
    [
        pytest.param({1: {"a": 2}, 2: {"b": 2}}, 0, id="none"),
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
            played(turns=[{"text": call("A")}, {"text": "Answer: 7", "read": "[tool] 999"}]),
            "no game",
            id="a result that a new root reads",
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


def run_folder(folder: Path, *, reward: float = 1.0) -> RunConfig:
    """Return the configuration of a run whose archive has two games of a group."""
    game = played(reward=reward)
    archive = {**game, "responses": game["responses"] * N}
    archive["responses"][1] = {"text": "", "failure": "environment: gone"}
    (folder / "samples").mkdir()
    (folder / "samples" / "00000001.jsonl").write_text(json.dumps(archive) + "\n")
    row = {
        "prompt": [{"role": "user", "content": "Add"}],
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"jars": JARS},
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    return load_config(
        None,
        [
            f"sluice.run_dir={folder}",
            f"data.train_files={folder / 'train.parquet'}",
            f"actor_rollout_ref.rollout.n={N}",
        ],
    )


FAILED = line("a", scored=1, episodes=[{"end": "done"}, {"end": None}])
ZEROS = {"episodes_lost": 0, "episodes_doubled": 0, "failure_rewards": 0}


@pytest.mark.parametrize(
    ("lines", "trained", "reward", "faults"),
    [
        pytest.param([FAILED], 1, 1.0, {}, id="an honest run"),
        pytest.param([{**FAILED, "tokens": [5]}], 1, 1.0, {"episodes_lost": 1}, id="lost"),
        pytest.param([FAILED], 2, 1.0, {"episodes_doubled": 1}, id="doubled"),
        pytest.param([FAILED], 1, 0.5, {"failure_rewards": 1}, id="wrongly rewarded"),
    ],
)
def test_a_run_is_judged_by_its_folder(
    tmp_path: Path, lines: list, trained: int, reward: float, faults: dict
) -> None:
    config = run_folder(tmp_path, reward=reward)
    found = judge_episodes(lines, {1: {"a": trained}}, config)
    assert {name: found.figures[name] for name in ZEROS} == {**ZEROS, **faults}
    assert {name for name, texts in found.examples.items() if texts} == set(faults)
    assert found.figures["groups_ended"] == {"trained": 1}
    assert found.figures["episodes_trained"] == trained
    assert found.figures["episodes_replayed"] == 1
    assert found.figures["episodes_failed"] == {"environment": 1}
    assert read_games(str(tmp_path / "train.parquet")) == {("Add", "7"): [JARS]}
