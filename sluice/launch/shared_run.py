"""The state that the launchers of one run on several hosts share, in files of the run's folder.

Each service has its own launcher, and all of them see the folder. Its files hold the checkpoints at
the run's beginning, the number of starts of each launcher, and how the run ended. A file is
replaced as a whole, so no reader sees half of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.errors import ConfigError
from sluice.service_contract import checkpoint_mark

_FOLDER, _BEGINNING, _ENDING = "launch", "began.json", "ended.json"


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a run ended: `failures` holds the diagnosis of the service that failed."""

    service: str
    failures: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its end."""
        return not self.failures


class SharedRun:
    """The files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / _FOLDER
        self._claims: list[int] = []

    @property
    def is_active(self) -> bool:
        """Whether a run has begun and not ended."""
        return (self._folder / _BEGINNING).is_file() and self.ending() is None

    def begin(self, checkpoints: Path) -> None:
        """Record that a run begins, in place of an earlier one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for starts_file in self._folder.glob("*.starts"):
            starts_file.unlink()
        self._write(_BEGINNING, {"checkpoints_before": checkpoint_mark(checkpoints)})
        (self._folder / _ENDING).unlink(missing_ok=True)

    def checkpoints_before(self) -> str:
        """Return the mark of the checkpoints that were there before the run.

        Raises:
            ConfigError: no run was begun in the folder, or its file cannot be used.
            OSError: the file system fails, perhaps for a moment; the configuration may be right.
        """
        try:
            content = json.loads((self._folder / _BEGINNING).read_text(encoding="utf-8"))
            return str(content["checkpoints_before"])
        except (FileNotFoundError, PermissionError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._folder / _BEGINNING}: {error}; begin the run with `sluice prepare`"
            ) from error

    def count_start(self, name: str) -> int:
        """Count a start of a service's launcher; return the number of earlier ones in this run."""
        file = self._folder / f"{name}.starts"
        before = len(file.read_bytes()) if file.is_file() else 0
        with file.open("ab") as starts:
            starts.write(b".")
        return before

    def claim_replica(self, max_replicas: int) -> int | None:
        """Claim a number below `max_replicas` while this process lives; ``None``: others have all.

        For launchers on one machine, whose kernel releases the claim of one that dies.
        """
        for number in range(max_replicas):
            file = self._folder / f"replica-{number}.claim"
            claim = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(claim)
                continue
            self._claims.append(claim)
            return number
        return None

    def release(self) -> None:
        """Give up what this launcher has claimed."""
        while self._claims:
            os.close(self._claims.pop())

    def end(self, ending: RunEnding) -> None:
        """Record for all launchers that the run is over; the first end counts."""
        if self.ending() is None:
            self._write(_ENDING, asdict(ending))

    def ending(self) -> RunEnding | None:
        """Return how the run ended; None while it runs.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            text = (self._folder / _ENDING).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        content = json.loads(text)
        return RunEnding(str(content["service"]), tuple(map(str, content["failures"])))

    def _write(self, name: str, content: object) -> None:
        partial = self._folder / f"{name}.{uuid.uuid4().hex}.partial"
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
        partial.replace(self._folder / name)
