"""Write the programming problems of Eurus-2-RL-Data into a file; it is published in verl's format.

    python prepare.py data/code-test.parquet validation-*.parquet

Mathematics is left out, and so is a row whose tests are no JSON with inputs and outputs.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

SOURCES = ["codecontests", "apps", "codeforces", "taco"]
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def has_tests(row):
    try:
        tests = json.loads(row["reward_model"]["ground_truth"])
        return len(tests["inputs"]) == len(tests["outputs"]) > 0
    except (ValueError, KeyError, TypeError):
        return False


def prepare(output, inputs):
    """Return the numbers of rows written and left out."""
    code = ds.field("data_source").isin(SOURCES)
    scanned = ds.dataset(inputs).scanner(columns=COLUMNS, filter=code, batch_size=256)
    schema, written, seen = scanned.projected_schema, 0, 0
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(output, schema) as writer:
        for batch in scanned.to_batches():
            rows = [row for row in batch.to_pylist() if has_tests(row)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            written, seen = written + len(rows), seen + batch.num_rows
    return written, seen - written


if __name__ == "__main__":
    written, left_out = prepare(sys.argv[1], sys.argv[2:])
    print(f"{sys.argv[1]}: {written} problems; {left_out} without tests left out")
