"""A large data set is read in pieces: memory does not grow with its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.source_tree import ROOT

DISTINCT_ROWS, COPIES = 5_000, 60
TEXT = "Find the remainder when the sum of the first terms is divided by a prime. " * 16
BOUND_MIB = 120
"""Over the process before it; the 300 000 rows are 360 MiB of text."""

PROGRAM = """
import sys
from pathlib import Path
from services.reward.prompts.dataset import training_files, training_stream
from sluice.config.schema.data import DataConfig
from sluice.types import DataProgress

def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

before = peak_mib()
once = sys.argv[2] == "deduplicated"
data = DataConfig(train_files=sys.argv[1], shuffle_buffer_rows=4096, deduplicate=once)
files = training_files(data)
progress = DataProgress(0)
stream = training_stream(files, data, progress, total_epochs=1, check_data_source=None)
taken = 0
while draws := stream.take(64):
    taken += len(draws)
    if sys.argv[2] == "all" and taken > 40_000:
        break
print(taken, stream.rows_per_epoch, peak_mib() - before)
"""


def distinct_rows() -> list[dict[str, object]]:
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{number} {TEXT}"}],
            "reward_model": {"ground_truth": str(number), "style": "rule"},
        }
        for number in range(DISTINCT_ROWS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in many row groups, in a single one, and as lines."""
    folder, rows = tmp_path_factory.mktemp("large"), distinct_rows()
    table = pa.Table.from_pylist(rows)
    with pq.ParquetWriter(folder / "many.parquet", table.schema) as many:
        for _ in range(COPIES):
            many.write_table(table)
    one = pa.concat_tables([table] * (COPIES // 3))
    pq.write_table(one, folder / "one.parquet", row_group_size=one.num_rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with (folder / "many.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(COPIES // 5):
            file.write(lines)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("many.parquet", "all"),
        ("many.parquet", "deduplicated"),
        ("one.parquet", "all"),
        ("many.jsonl", "all"),
    ],
)
def test_memory_is_bounded_by_the_window_not_by_the_rows(
    folder: Path, name: str, mode: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / name), mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sampled, rows_per_epoch, grown_mib = done.stdout.split()
    if mode == "deduplicated":
        assert (int(sampled), int(rows_per_epoch)) == (DISTINCT_ROWS, DISTINCT_ROWS)
    assert int(sampled) >= DISTINCT_ROWS
    assert float(grown_mib) < BOUND_MIB
