"""Quarantine prompts that fail repeatedly and cost other prompts their capacity.

A visit whose group failed by a scorer that hung or crashed, or by an error that a replica's engine
answered with, is a strike against the prompt's words (`prompt_key`), whichever row or client brings
them. A group that ends in any other way takes its strikes back; one that is broken off (too old, or
by another trainer) says nothing. Strikes are in the ledger. After `max_strikes` in a row the prompt
gets a line in `<run_dir>/reward/quarantine.jsonl`, and from then on ends as failed without being
generated for.

That file is what counts: a service that starts anew quarantines the prompts in it and no others.
So a prompt is released by deleting its line (or the file) and starting the service anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.reward.generation.request import prompt_key
from services.reward.ledger.ledger import PromptLedger
from sluice.algorithm.groups.outcomes import is_quarantined
from sluice.errors import DataError
from sluice.types import Failed, Prompt

logger = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 500


class QuarantinedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file.

    Args:
        key: the prompt's words (`prompt_key`).
        prompt_id: under which it failed last.
        place: its file and row; empty for a client's.
        strikes: failed visits in a row.
        why: the last failure.
    """

    key: str
    prompt_id: str = ""
    place: str = ""
    strikes: int = 0
    why: str = ""


class Quarantine:
    """The prompts in quarantine, and the strikes of those that are not.

    Args:
        ledger: holds the strikes.
        max_strikes: visits in a row; ``None``: no prompt is quarantined.
        path: the file; ``None``: none is written, and quarantine ends with the process.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(
        self, ledger: PromptLedger, max_strikes: int | None, path: Path | None = None
    ) -> None:
        self._ledger, self._max_strikes, self._path = ledger, max_strikes, path
        self._found = dict(read_quarantine(path)) if path is not None else {}
        if path is not None and path.exists():
            _end_last_line(path)
        self._release_others()

    def __len__(self) -> int:
        return len(self._found)

    def reason(self, prompt: Prompt) -> str | None:
        """Why a prompt is not to be drawn; ``None``: it may be."""
        if not self._found or self._max_strikes is None:
            return None
        entry = self._found.get(prompt_key(prompt))
        return None if entry is None else self._description(entry)

    def struck(self, prompt: Prompt, failed: Failed) -> str | None:
        """Note a strike. Returns the reason if the prompt is quarantined by it."""
        if self._max_strikes is None:
            return None
        key = prompt_key(prompt)
        strikes = self._ledger.strikes(key) + 1
        self._ledger.note_strikes(key, strikes)
        if not is_quarantined(strikes, self._max_strikes):
            return None
        entry = QuarantinedPrompt(
            key=key,
            prompt_id=prompt.prompt_id,
            place=prompt.place,
            strikes=strikes,
            why=f"{failed.kind}: {failed.detail}"[:MAX_DETAIL_CHARS],
        )
        self._found[key] = entry
        self._append(entry)
        logger.warning("prompt %s is %s", prompt.prompt_id, self._description(entry))
        return self._description(entry)

    def cleared(self, prompt: Prompt) -> None:
        """A visit ended without a strike: those before it do not count any more."""
        if not self._ledger.has_strikes:
            return
        key = prompt_key(prompt)
        if self._ledger.strikes(key) and key not in self._found:
            self._ledger.note_strikes(key, 0)

    def _description(self, entry: QuarantinedPrompt) -> str:
        where = self._path or "the memory of this service"
        return (
            f"quarantined: {entry.strikes} visits in a row failed, the last: {entry.why}; to "
            f"release it, repair the prompt or its scorer, delete its line ({entry.key}) from "
            f"{where} and start the reward service anew"
        )

    def _release_others(self) -> None:
        """Whoever has been taken out of the file begins without strikes."""
        for key, strikes in self._ledger.all_strikes().items():
            if is_quarantined(strikes, self._max_strikes) and key not in self._found:
                logger.info("prompt %s is released from quarantine", key)
                self._ledger.note_strikes(key, 0)

    def _append(self, entry: QuarantinedPrompt) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            logger.warning("%s: the quarantine is not listed: %s", self._path, error)


def read_quarantine(path: Path) -> Mapping[str, QuarantinedPrompt]:
    """The prompts of a file by their keys; none if there is no file.

    Lines that are none of a quarantine, such as one that a killed process left unfinished, are
    passed by with a warning.

    Raises:
        DataError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; repair the file or delete it") from error
    found: dict[str, QuarantinedPrompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = _entry(line)
        except ValueError as error:
            logger.warning("%s, line %d: no quarantined prompt: %s", path, number, error)
        else:
            found[entry.key] = entry
    return found


def _entry(line: bytes) -> QuarantinedPrompt:
    """Raises `ValueError` (msgspec's errors and those of UTF-8 are some) if the line is none."""
    return msgspec.json.decode(line, type=QuarantinedPrompt)


def _end_last_line(path: Path) -> None:
    """Make what is appended a line of its own: a last line without its end is ended, or cut off if
    it is unfinished."""
    try:
        with path.open("r+b") as file:
            whole, end, last = file.read().rpartition(b"\n")
            if not last.strip():
                return
            try:
                _entry(last)
            except ValueError:
                file.truncate(len(whole) + len(end))
            else:
                file.write(b"\n")
    except OSError as error:
        logger.warning("%s: its last line cannot be ended: %s", path, error)
