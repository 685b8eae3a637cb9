"""Parquet files in verl's row format for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def prompt_rows(contents: Sequence[str], data_source: str = "math_dapo") -> list[dict[str, object]]:
    """One row per content; the reference answer of row i is i."""
    return [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": content}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, content in enumerate(contents)
    ]


def write_prompts(
    path: Path, rows: Sequence[dict[str, object]], *, row_group_size: int = 100
) -> Path:
    """Write rows to `path`."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path
