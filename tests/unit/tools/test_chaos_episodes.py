"""A lost, doubled or wrongly rewarded episode is found; an honest run is not accused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from tools.chaos.episodes import judge_episodes, read_games

N = 2
JARS = {"A": 3, "B": 4}


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
    figures, examples = judge_episodes(lines, {1: {"a": trained}}, config)
    assert {name: figures[name] for name in ZEROS} == {**ZEROS, **faults}
    assert {name for name, texts in examples.items() if texts} == set(faults)
    assert figures["groups_ended"] == {"trained": 1}
    assert figures["episodes_trained"] == trained
    assert figures["episodes_replayed"] == 1
    assert figures["episodes_failed"] == {"environment": 1}
    assert read_games(str(tmp_path / "train.parquet")) == {("Add", "7"): [JARS]}
