"""Images of prompts outlive the reward service that accepted them, and no longer than needed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.source import prompt_key
from sluice.errors import DataError
from sluice.types import ChatMessage, DataProgress, Prompt, PromptEnd, PromptOrigin

IMAGES = (b"first image", b"second image")


def prompt(
    name: str, position: int | None = None, images: tuple[bytes, ...] = IMAGES, sequence: int = 0
) -> Prompt:
    return Prompt(
        name,
        sequence,
        (ChatMessage("user", "<image><image>?"),),
        "math_dapo",
        "1",
        PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET,
        position,
        images=images,
    )


def kept(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM images").fetchone()[0])


async def test_the_images_of_a_pending_prompt_are_durable_with_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    with PromptLedger(path) as ledger:
        for each in (prompt("client"), prompt("data-3", 3, sequence=1)):
            ledger.accept(each)
        await ledger.durable()  # what a receipt waits for
        for suffix in ("", "-wal"):
            Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
        assert ledger.client_image_bytes == sum(map(len, IMAGES))
    with PromptLedger(copy) as found:
        assert found.pending() == (prompt("client"), prompt("data-3", 3, sequence=1))
        assert found.client_image_bytes == sum(map(len, IMAGES))


@pytest.mark.parametrize("end", [PromptEnd.FILTERED_ALL_WRONG, PromptEnd.DROPPED_FAILED])
def test_images_leave_with_a_prompt_that_is_never_issued_again(
    tmp_path: Path, end: PromptEnd
) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        ledger.accept(prompt("client"))
        ledger.accept(prompt("data-0", 0))
        ledger.end("client", end)
        ledger.end("data-0", PromptEnd.TRAINED)
        assert ledger.client_image_bytes == 0
    assert kept(path) == 0


def test_images_of_rows_that_are_taken_again_leave(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        ledger.accept(prompt("client"))
        ledger.accept(prompt("data-0", 0))
        ledger.forget_data()
        ledger.restart_data(DataProgress(0))
    assert kept(path) == 2


async def test_a_trained_prompt_that_is_issued_again_has_its_images(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        ledger.accept(prompt("client"))
        ledger.end("client", PromptEnd.TRAINED, step=3)
    with PromptLedger(path) as ledger:
        (found,) = await ledger.trained_after(2)
        assert found == prompt("client")
        ledger.reissue([found])
    with PromptLedger(path) as ledger:
        assert ledger.pending() == (prompt("client"),)


def test_a_file_whose_images_are_others_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        ledger.accept(prompt("client"))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE images SET image = x'00' WHERE place = 1")
    with pytest.raises(DataError, match="'client': its images are not those that were written"):
        PromptLedger(path)


def test_prompts_that_differ_in_an_image_alone_have_different_keys() -> None:
    keys = {
        prompt_key(prompt("a", images=images))
        for images in ((), (b"x",), (b"y",), (b"x", b"y"), (b"y", b"x"), (b"xy",))
    }
    assert len(keys) == 6


def test_a_ledger_in_memory_counts_image_bytes_of_clients_alone() -> None:
    ledger = PromptLedger()
    ledger.accept(prompt("data-0", 0))
    ledger.accept(prompt("client"))
    assert ledger.client_image_bytes == sum(map(len, IMAGES))
    ledger.end("client", PromptEnd.TRAINED)
    assert ledger.client_image_bytes == 0
