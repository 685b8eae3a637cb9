"""The memory of prompts on disk: what is saved is read again, whatever happens in between."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.prompts.history import APPLICATION_ID, PromptMemoryStore
from sluice.algorithm.sampling.attempt import PromptHistory, RememberedAttempt, update_history
from sluice.errors import DataError
from tests.support.source_tree import ROOT

KEY, OTHER = "00" * 16, "ff" * 16
SEEN = RememberedAttempt(3, 16, 17.125, 3)


def stored(path: Path, *keys: str) -> list[PromptHistory | None]:
    with PromptMemoryStore(path) as store:
        return [store.read(key) for key in keys]


def test_what_was_saved_is_read_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "reward" / "memory.sqlite"
    with PromptMemoryStore(path) as store:
        assert store.read(KEY) is None
        store.add([(KEY, SEEN)])
    assert stored(path, KEY, OTHER) == [update_history(None, SEEN), None]


def test_attempts_that_overlapped_are_all_remembered(tmp_path: Path) -> None:
    with PromptMemoryStore(tmp_path / "memory.sqlite") as store:
        store.add([(KEY, SEEN), (KEY, SEEN)])
        store.add([(KEY, SEEN)])
        history = store.read(KEY)
    assert history is not None
    assert (history.num_right, history.num_wrong, history.num_attempts) == (9.0, 39.0, 3)


def test_lengths_are_those_of_the_prompts_visited_last(tmp_path: Path) -> None:
    with PromptMemoryStore(tmp_path / "memory.sqlite") as store:
        for version, key in enumerate([KEY, OTHER, "ab" * 16]):
            store.add([(key, RememberedAttempt(1, 2, 10.0 + version, version))])
        assert store.lengths(2) == [(OTHER, 11.0), ("ab" * 16, 12.0)]


attempts = st.builds(
    RememberedAttempt,
    st.integers(0, 16),
    st.integers(16, 64),
    st.floats(0.0, 1e9, allow_nan=False),
    st.integers(0, 2**40),
)


@given(seen=st.lists(st.tuples(st.sampled_from([KEY, OTHER, "ab" * 16]), attempts), max_size=20))
def test_a_file_remembers_what_memory_would_to_the_last_bit(
    seen: list[tuple[str, RememberedAttempt]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("memory") / "memory.sqlite"
    expected: dict[str, PromptHistory] = {}
    for key, attempt in seen:
        expected[key] = update_history(expected.get(key), attempt)
    with PromptMemoryStore(path) as store:
        store.add(seen)
    with PromptMemoryStore(path) as store:
        assert {key: store.read(key) for key in expected} == expected


WRITER = """
import sys, time
from pathlib import Path
from services.reward.prompts.history import PromptMemoryStore
from sluice.algorithm.sampling.attempt import RememberedAttempt
store = PromptMemoryStore(Path(sys.argv[1]))
version = 0
while True:
    rows = [(f"{i:032x}", RememberedAttempt(1, 2, 1.0, version)) for i in range(5000)]
    print("saving", flush=True)
    store.add(rows)
    print("saved", flush=True)
    version += 1
"""


def test_a_killed_process_leaves_whole_transactions_and_loses_none_that_was_saved(
    tmp_path: Path,
) -> None:
    path = tmp_path / "memory.sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        before = [process.stdout.readline() for _ in range(7)]
        assert before[-1] == "saving\n"
        log = tmp_path / "memory.sqlite-wal"
        unwritten, ends_s = log.stat().st_mtime_ns, time.monotonic() + 60
        while log.stat().st_mtime_ns == unwritten and time.monotonic() < ends_s:
            pass  # the transaction is still in the writer's memory
        os.kill(process.pid, signal.SIGKILL)
        saved = [line for line in (*before, *process.stdout) if line == "saved\n"]
    process.wait()
    found = stored(path, *(f"{i:032x}" for i in range(5000)))
    versions = {history.version for history in found if history is not None}
    assert len(versions) == 1
    assert versions.pop() >= len(saved) - 1
    assert None not in found


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    with PromptMemoryStore(path) as store:
        store.add([(f"{i:032x}", SEEN) for i in range(2000)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"memory\.sqlite: .* cannot be used.*move it away"):
        PromptMemoryStore(path)


def test_a_file_that_is_no_database_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    path.write_text("these are notes, not a database\n" * 100)
    with pytest.raises(DataError, match=r"not a database.*move it away"):
        PromptMemoryStore(path)


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(DataError, match="of another program"):
        PromptMemoryStore(path)
    assert path.read_bytes() == before


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    PromptMemoryStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 9")
        assert database.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    database.close()
    with pytest.raises(DataError, match="format 9"):
        PromptMemoryStore(path)
