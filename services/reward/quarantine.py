"""Prompts that fail again and again at the cost of others, and are drawn no more.

A visit whose group failed by a scorer that hung or crashed, or by the engine, is a strike against
the prompt's words (`prompt_key`), whichever row or client brings them; any other end takes its
strikes back. Strikes are in the ledger. After `max_strikes` in a row the prompt gets a line in
`<run_dir>/reward/quarantine.jsonl`, and from then on ends as failed without being generated for.

That file is what counts: a service that starts anew quarantines the prompts in it and no others.
So a prompt is released by deleting its line (or the file) and starting the service anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.reward.ledger import PromptLedger
from services.reward.prompt_key import prompt_key
from sluice.algorithm.outcome_policy import is_quarantined
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
        self._release_others()

    def __len__(self) -> int:
        return len(self._found)

    def reason(self, prompt: Prompt) -> str | None:
        """Why a prompt is not to be drawn; ``None``: it may be."""
        if not self._found or self._max_strikes is None:
            return None
        entry = self._found.get(prompt_key(prompt))
        return None if entry is None else self._told(entry)

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
        logger.warning("prompt %s is %s", prompt.prompt_id, self._told(entry))
        return self._told(entry)

    def cleared(self, prompt: Prompt) -> None:
        """A visit ended well: strikes before it do not count any more."""
        if not self._ledger.has_strikes:
            return
        key = prompt_key(prompt)
        if self._ledger.strikes(key) and key not in self._found:
            self._ledger.note_strikes(key, 0)

    def _told(self, entry: QuarantinedPrompt) -> str:
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

    A last line that a killed process left unfinished is passed by.

    Raises:
        DataError: a line is none of a quarantine.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; repair the file or delete it") from error
    found: dict[str, QuarantinedPrompt] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = msgspec.json.decode(line, type=QuarantinedPrompt) if line.strip() else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path}, line {number}: no quarantined prompt ({error}); repair or delete the line"
            ) from error
        if entry is not None:
            found[entry.key] = entry
    return found
