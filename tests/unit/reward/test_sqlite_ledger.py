"""What the ledger's file says is what the ledger knew, at every moment that it is opened again."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.ledger.ledger import ACKNOWLEDGED_REMEMBERED, PromptLedger
from sluice.errors import DataError, InvalidRequestError
from sluice.types import ChatMessage, DataProgress, Prompt, PromptEnd, PromptOrigin

ENDED_IDS = 3
CLIENTS = [f"client-{i}" for i in range(6)]


def prompt(name: str, sequence: int, position: int | None = None) -> Prompt:
    return Prompt(
        prompt_id=name,
        sequence=sequence,
        messages=(ChatMessage("user", f"What is {name}?"),),
        data_source="math_dapo",
        ground_truth="1",
        origin=PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET,
        position=position,
        extra_info={"index": sequence, "tags": ["a", {"b": 0.5}]},
        place="" if position is None else f"train.parquet, row {position}",
        images=(b"\x89PNG", name.encode()) if sequence % 2 else (),
    )


def accept(ledger: PromptLedger, name: str, position: int | None = None) -> None:
    ledger.accept(prompt(name, ledger.next_sequence(), position))


Event = tuple[str, int, PromptEnd]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["client", "draw", "end", "end", "lease", "release", "trained", "resume", "forget"]
        ),
        st.integers(0, 5),
        st.sampled_from(list(PromptEnd)),
    ),
    max_size=14,
)


def apply(ledger: PromptLedger, event: Event) -> None:
    """One event, where it is possible."""
    what, number, end = event
    if what in {"client", "draw"}:
        name = CLIENTS[number] if what == "client" else f"data-{number}"
        if ledger.prompts.get(name) is None and ledger.ended.get(name) is None:
            accept(ledger, name, None if what == "client" else number)
    elif what == "resume":
        ledger.restart_data(DataProgress(number, (number + 2,)))
        ledger.begin_trainer(f"trainer-{number}", number)
    elif what == "release":
        ledger.void_lease()
    else:
        apply_to_pending(ledger, what, number, end)


def apply_to_pending(ledger: PromptLedger, what: str, number: int, end: PromptEnd) -> None:
    lease = ledger.open_lease
    free = [p for p in ledger.pending() if lease is None or p.prompt_id not in lease.prompt_ids]
    if what == "end" and free:
        chosen = free[number % len(free)]
        ledger.end(chosen.prompt_id, end, step=number, rewards=(0.5, -1.0), detail="why")
    elif what == "lease" and free and lease is None:
        batch_id = f"batch-{ledger.num_acknowledged}-{number}"  # no batch is named twice
        ledger.lease(batch_id, number, [p.prompt_id for p in free[:3]])
    elif what == "trained" and lease is not None:
        for leased in ledger.leased_ids():
            ledger.end(leased, PromptEnd.TRAINED, step=number)
        ledger.acknowledge()
    elif what == "forget" and lease is None:
        ledger.forget_data()


def known(ledger: PromptLedger) -> dict[str, object]:
    return {
        "next sequence": ledger._sequence,
        "pending": ledger.pending(),
        "ended": dict(ledger.ended),
        "by end": ledger.by_end,
        "submitted": ledger.num_submitted,
        "progress": ledger.progress(),
        "lease": (ledger.open_lease, ledger.leased_ids(), ledger.newest_leased_version),
        "acknowledged": (ledger.num_acknowledged, list(ledger._acknowledged)),
        "trainer": ledger.trainer,
        "strikes": dict(ledger.all_strikes),
        "rollbacks": ledger._rollbacks,
    }


@given(EVENTS)
@settings(deadline=None, max_examples=25)
def test_a_ledger_opened_again_after_any_event_knows_what_one_in_memory_does(
    events: list[Event],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward" / "ledger.sqlite"
        model = PromptLedger(ended_ids=ENDED_IDS)
        for event in events:
            apply(model, event)
            with PromptLedger(path, ended_ids=ENDED_IDS) as ledger:
                apply(ledger, event)
            with PromptLedger(path, ended_ids=ENDED_IDS) as again:
                assert known(again) == known(model)


async def test_what_is_durable_is_in_the_file_of_a_process_that_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = PromptLedger(path)
    for number in range(100):
        accept(ledger, f"client-{number}")
    await ledger.durable()
    copy = tmp_path / "copy.sqlite"
    for suffix in ("", "-wal"):
        (tmp_path / f"copy.sqlite{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    with PromptLedger(copy) as found:
        assert len(found.pending()) == 100
    ledger.close()


async def test_a_clients_prompts_of_later_steps_are_accepted_once_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        for step, end in enumerate([PromptEnd.TRAINED] * 4 + [PromptEnd.DROPPED_FAILED], 1):
            accept(ledger, f"client-{step}")
            ledger.end(f"client-{step}", end, step=step if end is PromptEnd.TRAINED else None)
        prompts = await ledger.trained_after(2)
        assert [each.prompt_id for each in prompts] == ["client-3", "client-4"]
        assert prompts[0] == prompt("client-3", 2)
        ledger.reissue(prompts)
        assert await ledger.trained_after(2) == ()
    with PromptLedger(path) as again:
        assert again.pending() == prompts
        assert again.num_submitted == 7
        assert again.ended.get("client-3") is None
        assert again.next_sequence() == 5


async def test_the_file_does_not_grow_with_prompts_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path, ended_ids=5) as ledger:
        for number in range(200):
            accept(ledger, f"data-{number}", number)
            accept(ledger, f"client-{number}")
            names = [f"data-{number}", f"client-{number}"]
            ledger.lease(f"batch-{number}", number, names)
            for name in names:
                ledger.end(name, PromptEnd.TRAINED, step=number + 1)
            ledger.acknowledge()
    with closing(sqlite3.connect(path)) as database:
        rows = {
            name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("pending", "ended", "ended_positions", "lease", "acknowledged", "images")
        }
    assert rows == {
        "pending": 0,
        "ended": 5,
        "ended_positions": 0,
        "lease": 0,
        "acknowledged": ACKNOWLEDGED_REMEMBERED,
        "images": 2 * 5,  # of trained prompts that may be issued again
    }
    with PromptLedger(path, ended_ids=5) as again:
        assert again.num_acknowledged == 400
        assert again.progress() == DataProgress(200)


async def test_a_text_that_the_file_cannot_hold_fails_every_wait_at_once(tmp_path: Path) -> None:
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        accept(ledger, "a")
        ledger.end("a", PromptEnd.DROPPED_FAILED, detail="\udcff.parquet, row 3")
        async with asyncio.timeout(60):
            with pytest.raises(DataError, match="surrogates not allowed"):
                await ledger.durable()
            assert "surrogates not allowed" in str(await ledger.failure())


async def test_a_file_that_cannot_be_written_fails_every_wait_and_every_change(
    tmp_path: Path,
) -> None:
    ledger = PromptLedger(tmp_path / "ledger.sqlite")
    async with asyncio.TaskGroup() as tasks:
        failure = tasks.create_task(ledger.failure())
        await asyncio.sleep(0)
        ledger._writer.write([("INSERT INTO nowhere VALUES (1)", ())])
        with pytest.raises(DataError, match=r"ledger\.sqlite: the ledger cannot be used.*nowhere"):
            await ledger.durable()
    assert "free the disk" in str(failure.result())
    with pytest.raises(DataError, match="nowhere"):
        accept(ledger, "client-1")
    ledger.close()


def damaged(path: Path) -> None:
    with PromptLedger(path) as ledger:
        for number in range(200):
            accept(ledger, f"client-{number}")
    content = bytearray(path.read_bytes())
    content[4096 * 4 : 4096 * 6] = b"\xff" * 8192
    path.write_bytes(content)


def of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (x)")


def of_another_format(path: Path) -> None:
    PromptLedger(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 6")


def no_database(path: Path) -> None:
    path.write_bytes(b"prompts: none" * 1000)


def unreadable_body(path: Path) -> None:
    with PromptLedger(path) as ledger:
        accept(ledger, "client-1")
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE pending SET body = x'c1'")
        database.commit()


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (damaged, "the ledger cannot be used: .*restore the file, or move it away"),
        (of_another_program, "a database of another program.*move it away"),
        (
            of_another_format,
            "format 6, and this version of sluice reads 7; use the version that",
        ),
        (no_database, "the ledger cannot be used: file is not a database"),
        (unreadable_body, "the ledger cannot be used"),
    ],
)
def test_a_file_that_is_no_ledger_of_ours_is_refused_with_the_remedy(
    tmp_path: Path, make: Callable[[Path], None], reported: str
) -> None:
    path = tmp_path / "ledger.sqlite"
    make(path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=rf"ledger\.sqlite: {reported}"):
        PromptLedger(path)
    assert path.read_bytes() == before


def test_one_process_at_a_time_uses_a_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.sqlite_file.BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path), pytest.raises(DataError, match="another process uses this ledger"):
        PromptLedger(path)
    PromptLedger(path).close()


def test_a_prompt_that_cannot_be_kept_is_refused_from_a_client_and_taken_again_from_data(
    tmp_path: Path,
) -> None:
    odd = {"number": 1 << 80}
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        for name, position in (("client-1", None), ("data-0", 0)):
            made = prompt(name, ledger.next_sequence(), position)
            made = Prompt(**{**{f: getattr(made, f) for f in made.__slots__}, "extra_info": odd})
            if position is None:
                with pytest.raises(InvalidRequestError, match="extra_info cannot be kept"):
                    ledger.accept(made)
            else:
                ledger.accept(made)
        assert [each.prompt_id for each in ledger.pending()] == ["data-0"]
    with PromptLedger(tmp_path / "ledger.sqlite") as again:
        assert again.pending() == ()
        assert again.num_submitted == 0
