"""Questions about pictures as parquet files in the row format of Geometry3k for verl.

The columns of `sluice.quickstart.dataset`, and `images`: a list of structs with an encoded file in
`bytes`. The user's message holds ``<image>`` where the picture belongs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.quickstart.dataset import DATA_SOURCE, ROW_GROUP_ROWS
from sluice.quickstart.shape_pictures import picture
from sluice.quickstart.shapes import ShapeQuestion

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


def to_row(question: ShapeQuestion, index: int, split: str) -> dict[str, object]:
    """One row: the picture and the question as a single user message."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question.question}],
        "images": [{"bytes": picture(question.scene)}],
        "ability": "shapes",
        "reward_model": {"ground_truth": question.answer, "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


def write_shapes(path: Path, asked: Iterable[ShapeQuestion], split: str) -> None:
    """Write the questions in order, in row groups small enough to stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [to_row(question, index, split) for index, question in enumerate(asked)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)
