"""Quarantine prompts that fail repeatedly and cost other prompts their capacity.

An attempt is a strike against the prompt's text (`prompt_key`) if its group failed because a scorer
hung or crashed, or because a replica's engine answered with an error. It does not matter which row
or client sends the text. A group that ends in another way clears the strikes; an aborted group (too
old, or stopped by another trainer) changes nothing. The ledger keeps strikes. After `max_strikes`
in a row the prompt gets a line in `<run_dir>/reward/quarantine.jsonl`. From then on it ends as
failed without being generated.

The file decides: a restarted service quarantines the prompts in it and no others. To release a
prompt, delete its line (or the file) and restart the service.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.source import prompt_key
from sluice.algorithm.groups.filter import is_quarantined
from sluice.errors import DataError
from sluice.types import Failed, Prompt
from sluice.whole_file import append_lines

logger = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 500


class QuarantinedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file.

    Args:
        key: hash of the prompt's text (`prompt_key`).
        prompt_id: its id at the last failure.
        place: its file and row; empty for a client's prompt.
        strikes: failed attempts in a row.
        why: the last failure.
    """

    key: str
    prompt_id: str = ""
    place: str = ""
    strikes: int = 0
    why: str = ""


class Quarantine:
    """The prompts in quarantine, and the strikes of other prompts.

    Args:
        ledger: keeps the strikes.
        max_strikes: strikes in a row; ``None`` quarantines no prompt.
        path: the file; ``None`` writes none, and quarantine ends with the process.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(
        self, ledger: PromptLedger, max_strikes: int | None, path: Path | None = None
    ) -> None:
        self._ledger, self._max_strikes, self._path = ledger, max_strikes, path
        self._entries = dict(read_quarantine(path)) if path is not None else {}
        self._release_others()

    def __len__(self) -> int:
        return len(self._entries)

    def reason(self, prompt: Prompt) -> str | None:
        """Return why a prompt must not start; ``None`` if it may."""
        if not self._entries or self._max_strikes is None:
            return None
        entry = self._entries.get(prompt_key(prompt))
        return None if entry is None else self._description(entry)

    def add_strike(self, prompt: Prompt, failed: Failed) -> str | None:
        """Note a strike. Return the reason if it quarantines the prompt."""
        if self._max_strikes is None:
            return None
        key = prompt_key(prompt)
        strikes = self._ledger.all_strikes.get(key, 0) + 1
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
        self._entries[key] = entry
        self._append(entry)
        logger.warning("prompt %s is %s", prompt.prompt_id, self._description(entry))
        return self._description(entry)

    def clear_strikes(self, prompt: Prompt) -> None:
        """Clear the strikes of a prompt whose attempt ended without one."""
        if self._ledger.all_strikes:
            key = prompt_key(prompt)
            if key in self._ledger.all_strikes and key not in self._entries:
                self._ledger.note_strikes(key, 0)

    def _description(self, entry: QuarantinedPrompt) -> str:
        place = self._path or "the memory of this service"
        return (
            f"quarantined: {entry.strikes} attempts in a row failed, the last: {entry.why}; to "
            f"release it, repair the prompt or its scorer, delete its line ({entry.key}) from "
            f"{place} and restart the reward service"
        )

    def _release_others(self) -> None:
        """Clear the strikes of prompts that were deleted from the file."""
        for key, strikes in dict(self._ledger.all_strikes).items():
            if is_quarantined(strikes, self._max_strikes) and key not in self._entries:
                logger.info("prompt %s is released from quarantine", key)
                self._ledger.note_strikes(key, 0)

    def _append(self, entry: QuarantinedPrompt) -> None:
        if self._path is None:
            return
        try:
            append_lines(self._path, msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            logger.warning("%s: the quarantine is not listed: %s", self._path, error)


def read_quarantine(path: Path) -> Mapping[str, QuarantinedPrompt]:
    """Return the prompts of a file by key; none if there is no file.

    Skip, with a warning, lines that are not quarantined prompts, such as one that a killed process
    left unfinished.

    Raises:
        DataError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; repair the file or delete it") from error
    entries: dict[str, QuarantinedPrompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=QuarantinedPrompt)
        except ValueError as error:
            logger.warning("%s, line %d: not a quarantined prompt: %s", path, number, error)
        else:
            entries[entry.key] = entry
    return entries
