"""Files of the run folder that the service writes: ledger, memory, log of groups, samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from services.reward.ended_groups import EndedGroups
from services.reward.group_log import GroupLog
from services.reward.prompt_memory_store import PromptMemoryStore
from services.reward.sqlite_ledger import SqliteLedger
from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.run import RunConfig
from sluice.telemetry.sample_archive import FOLDER_NAME, SampleArchive, mib

MEMORY_FILE = Path("reward") / "prompt_memory.sqlite"
LOG_FILE = Path("groups.jsonl")
LEDGER_FILE = Path("reward") / "ledger.sqlite"
QUARANTINE_FILE = Path("reward") / "quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """`memory` is ``None`` for strategies without one; `log` may be one that writes nothing.

    `ledger` is ``None`` where the ledger is to be in memory; `quarantine` is where prompts in
    quarantine are listed, ``None``: nowhere.
    """

    memory: PromptMemoryStore | None
    log: GroupLog
    ledger: SqliteLedger | None = None
    quarantine: Path | None = None


def no_run_files() -> RunFiles:
    """For a loop that leaves no files."""
    return RunFiles(None, GroupLog(None))


@contextmanager
def open_run_files(config: RunConfig) -> Iterator[RunFiles]:
    """Open the files, which are appended to where they exist.

    Raises:
        DataError: ledger or memory of prompts are damaged, in use or of another program.
    """
    folder, uses_memory = Path(config.sluice.run_dir), _uses_memory(config)
    log_file = folder / LOG_FILE if config.sluice.reward.group_log else None
    log = GroupLog(log_file, samples=_ended_groups(config))
    store = PromptMemoryStore(folder / MEMORY_FILE) if uses_memory else nullcontext()
    is_durable = config.sluice.reward.ledger == "sqlite"
    durable_ledger = SqliteLedger(folder / LEDGER_FILE) if is_durable else nullcontext()
    with durable_ledger as ledger, store as memory:
        yield RunFiles(memory, log, ledger, folder / QUARANTINE_FILE)


def _ended_groups(config: RunConfig) -> EndedGroups | None:
    kept = config.sluice.dashboard
    if kept.samples_mb == 0:
        return None
    folder = Path(config.sluice.run_dir) / FOLDER_NAME
    return EndedGroups(SampleArchive(folder, mib(kept.samples_mb)), kept.sample_chars)


def _uses_memory(config: RunConfig) -> bool:
    return StrategyName(config.sluice.sampling.strategy).uses_memory
