"""The parquet files are in the row format of DAPO-Math."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from sluice.quickstart.arithmetic import TASKS, Problem, Wording, split_problems, write_dataset


def test_a_row_has_the_columns_of_dapo_math(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.parquet"
    problem = Problem(Wording.FORMULA, (2, 6, 9))
    write_dataset(path, (problem,), "train")
    assert pq.read_table(path).to_pylist() == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "17", "style": "rule"},
            "extra_info": {"index": 0, "split": "train", "num_terms": 3},
        }
    ]


def test_row_groups_are_small_enough_to_stream_and_rows_keep_their_order(tmp_path: Path) -> None:
    problems = split_problems(TASKS["quickstart"], 0, 2500, 10).train
    path = tmp_path / "train.parquet"
    write_dataset(path, problems, "train")
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert sizes == [1024, 1024, 452]
    rows = pq.read_table(path).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(2500))
    assert [row["reward_model"]["ground_truth"] for row in rows] == [
        str(p.answer) for p in problems
    ]
