"""Problems as parquet files in the row format of DAPO-Math.

Columns: `data_source`, `prompt` (list of role and content), `ability`, `reward_model`
(`ground_truth` as text, `style`) and `extra_info` (`index`, `split`, `num_terms`).
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.quickstart.problems import Problem

DATA_SOURCE = "math_dapo"
ROW_GROUP_ROWS = 1024

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct([("index", pa.int64()), ("split", pa.string()), ("num_terms", pa.int64())]),
        ),
    ]
)


def to_row(problem: Problem, index: int, split: str) -> dict[str, object]:
    """One row: the question as a single user message, the right result as ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
        "extra_info": {"index": index, "split": split, "num_terms": len(problem.terms)},
    }


def write_dataset(path: Path, problems: tuple[Problem, ...], split: str) -> None:
    """Write the problems in order, in row groups small enough to stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [to_row(problem, index, split) for index, problem in enumerate(problems)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)
