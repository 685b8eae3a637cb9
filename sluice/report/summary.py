"""The numbers of a run, its accounting, and the versions of what it runs on, for programs
(`summary.json`) and people.

Every reader and writer of `summary.json` in sluice is here.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sluice import installed_version, own_version
from sluice.concurrency.process import (
    ENDED,
    MARKS_FOLDER,
    host_of_pids,
    mark_file,
    process_marks,
)
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from sluice.report.run_record import ACCOUNTS_NAME, METRICS_NAME, RunRecord, read_progress
from sluice.service_contract import CONFIG_NAME
from sluice.telemetry import metric_names
from sluice.whole_file import write_whole

SUMMARY_NAME = "summary.json"
_OF_AN_END = "outcome"
"""The name that only the end of a run writes; a summary of an active run lacks it."""
# Title, prefix of the parts, name of the total, name of the residual.
_ACCOUNTS = (
    ("tokens", "tokens/", "generated_tokens", "tokens_residual"),
    ("trainer", "trainer_s/", "trainer_wall_s", "trainer_seconds_residual"),
    ("rollout", "rollout_s/", "rollout_wall_s", "rollout_seconds_residual"),
)
_MIN_SHARE = 0.0005  # a smaller one would read 0.0 %
_MIN_AGE_S = 0.5  # a smaller one would read 0 s
_FILTERED = ("filtered_all_right", "filtered_all_wrong", "filtered_uniform")
_GROUPS = (metric_names.GROUPS_ALL_RIGHT, metric_names.GROUPS_ALL_WRONG)
_DROPPED = ("dropped_stale", "dropped_failed", "dropped_surplus")
_PACKAGES = ("torch", "transformers", *VENDOR_ENGINES, "ray", "grpcio", "typer")
_GIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers of a run over all its starts, but `seconds_total`, `seconds_services` and
    `accounts`, which are of the last one.

    Attributes:
        is_finished: whether it reached its end; otherwise prompts and tokens are as far as they are
            known, and numbers of prompts 0 if they are not.
        is_resumed: whether it was started more than once.
        accuracy_before: held-out accuracy of the untrained policy; ``None``: not validated.
        accuracy_after: held-out accuracy at the last validation; ``None``: there was none.
        accuracy_best, accuracy_best_step: the highest one, and the step after which it was found.
        seconds_total: the whole command.
        seconds_services: from the start of the services to their end.
        seconds_dapo: the training steps with all their waits.
        generated_tokens: all response tokens for training, including those of groups that no
            step used and of prompts that are pending at the end.
        validation_tokens: response tokens of validations, not in `generated_tokens`.
        groups_kept: groups that went into batches.
        prompts_lost: prompts that the accounting does not explain, including groups that the
            trainer trained and the reward service does not count as trained.
        accounts: the accounting, by the names of `accounts.json`.
    """

    is_finished: bool
    is_resumed: bool
    accuracy_before: float | None
    accuracy_after: float | None
    accuracy_best: float | None
    accuracy_best_step: int | None
    seconds_total: float
    seconds_services: float
    seconds_dapo: float
    steps: int
    generated_tokens: int
    trained_tokens: int
    validation_tokens: int
    groups_kept: int
    groups_all_right: int
    groups_all_wrong: int
    surplus_discarded: int
    prompts_submitted: int
    prompts_trained: int
    prompts_filtered: int
    prompts_dropped: int
    prompts_skipped: int
    prompts_pending: int
    prompts_lost: int
    max_staleness_seen: int
    accounts: Mapping[str, float]

    def as_text(self) -> str:
        """Return a few lines for the console."""
        before = "" if self.accuracy_before is None else f"{self.accuracy_before:.3f} -> "
        after = "not measured" if self.accuracy_after is None else f"{self.accuracy_after:.3f}"
        if self.accuracy_best is not None and self.accuracy_best != self.accuracy_after:
            after += f" (best {self.accuracy_best:.3f} after step {self.accuracy_best_step})"
        head = "" if self.is_finished else "not finished: the numbers so far\n"
        ratio = self.generated_tokens / max(self.trained_tokens, 1)
        since = "since the last start" if self.is_resumed else "in all"
        skipped = f"{self.prompts_skipped} skipped + " if self.prompts_skipped else ""
        prompts = (
            f"prompts: {self.prompts_submitted} submitted = {self.prompts_trained} trained + "
            f"{self.prompts_filtered} filtered + {self.prompts_dropped} dropped + {skipped}"
            f"{self.prompts_pending} pending; {self.prompts_lost} lost\n"
        )
        return (
            f"{head}held-out accuracy {before}{after} in "
            f"{self.steps} steps ({self.seconds_dapo:.0f} s of training, "
            f"{self.seconds_total:.0f} s {since})\n"
            f"tokens: {self.generated_tokens:,} generated, {self.trained_tokens:,} trained "
            f"({ratio:.2f} per trained token), {self.validation_tokens:,} for validation\n"
            f"groups: {self.groups_kept} kept, {self.groups_all_right} all right, "
            f"{self.groups_all_wrong} all wrong, {self.surplus_discarded} surplus discarded\n"
            f"{prompts if self.is_finished or self.prompts_submitted else ''}"
            f"largest staleness: {self.max_staleness_seen}"
            f"{self._accounting_text()}"
        )

    def _accounting_text(self) -> str:
        subjects = {
            "tokens": "all tokens",
            "trainer": "trainer's time",
            "rollout": "replicas' time",
        }
        since = " since the last start" if self.is_resumed else ""
        return "".join(
            f"\n{subjects[view.title]}{since} ({view.total_text}): {view.parts_text}"
            for view in account_views(self.accounts)
        )


def summarize(
    run_dir: Path,
    *,
    seconds_total: float | None = None,
    seconds_services: float | None = None,
    accounts: Mapping[str, float] | None = None,
) -> RunSummary:
    """Sum up a run's record, at any time.

    Args:
        run_dir: the run's folder.
        seconds_total: of the whole command; ``None``: as noted at its end, or to its last record.
        seconds_services: of its services; ``None``: the same.
        accounts: of a run that has not ended, by the names of `accounts.json`.

    Raises:
        DataError: a line cannot be read.
    """
    record = read_progress(run_dir)
    accuracies, accounts = record.accuracies(), record.accounts or accounts or {}
    best = max(accuracies, key=lambda point: point.accuracy, default=None)
    if seconds_total is None:
        seconds_total, seconds_services = _read_seconds(run_dir)

    def count(*names: str) -> int:
        return int(sum(accounts.get(name, 0.0) for name in names))

    right, wrong = (int(record.total(name)) for name in _GROUPS)
    tokens = _tokens_by_start(record, accounts)
    submitted, pending, skipped = count("submitted"), count("pending"), count("skipped")
    trained, filtered, dropped = count("trained"), count(*_FILTERED), count(*_DROPPED)
    explained = trained + filtered + dropped + skipped + pending
    return RunSummary(
        is_finished=bool(record.accounts),
        is_resumed=len(tokens) > 1,
        accuracy_before=next((point.accuracy for point in accuracies if point.step == 0), None),
        accuracy_after=accuracies[-1].accuracy if accuracies else None,
        accuracy_best=best.accuracy if best else None,
        accuracy_best_step=best.step if best else None,
        seconds_total=round(seconds_total, 2),
        seconds_services=round(seconds_services or seconds_total, 2),
        seconds_dapo=round(record.total(metric_names.STEP_S), 2),
        steps=len(record.steps),
        generated_tokens=_generated_tokens(record, tokens),
        trained_tokens=int(record.total(metric_names.TRAINED_TOKENS)),
        validation_tokens=record.validation_tokens,
        groups_kept=int(record.total(metric_names.GROUPS_KEPT)),
        groups_all_right=count("filtered_all_right") or right,
        groups_all_wrong=count("filtered_all_wrong") or wrong,
        surplus_discarded=int(record.total("train/surplus_discarded")),
        prompts_submitted=submitted,
        prompts_trained=trained,
        prompts_filtered=filtered,
        prompts_dropped=dropped,
        prompts_skipped=skipped,
        prompts_pending=pending,
        prompts_lost=count("prompts_lost") or submitted - explained,
        max_staleness_seen=int(record.maximum(metric_names.STALENESS_MAX)),
        accounts=dict(accounts),
    )


def _tokens_by_start(record: RunRecord, accounts: Mapping[str, float]) -> list[int]:
    """Return the last known number of sampled tokens of each start of a run: each begins at 0."""
    counts_of_steps = [row.get(f"{metric_names.ACCOUNTS}generated_tokens") for row in record.steps]
    counts = [
        int(number)
        for number in (*counts_of_steps, accounts.get("generated_tokens"))
        if number is not None
    ]
    return [earlier for earlier, later in pairwise([*counts, -1]) if later < earlier]


def _generated_tokens(record: RunRecord, tokens: list[int]) -> int:
    """Return the tokens for training; at least those of the steps, which may have no accounts."""
    of_steps = int(record.total(metric_names.GENERATED_TOKENS))
    return max(sum(tokens) - record.validation_tokens, of_steps)


def _read_seconds(run_dir: Path) -> tuple[float, float | None]:
    ended = read_summary(run_dir)
    return ended.get("seconds_total") or recorded_seconds(run_dir), ended.get("seconds_services")


def recorded_seconds(run_dir: Path) -> float:
    """Return the seconds from the last start of a run to its last record, by the files' times."""

    def written_s(name: str) -> float:
        file = run_dir / name
        return file.stat().st_mtime if file.is_file() else 0.0

    began_s = written_s(CONFIG_NAME)
    ended_s = max(written_s(METRICS_NAME), written_s(ACCOUNTS_NAME))
    return max(ended_s - began_s, 0.0) if began_s else 0.0


@dataclass(frozen=True, slots=True)
class AccountPart:
    """One part of an account; `share` is of its total."""

    name: str
    amount: float
    share: float


@dataclass(frozen=True, slots=True)
class AccountView:
    """One account: `parts` by size, without parts of less than 0.05 %.

    `total`, amounts and `residual` are tokens, or seconds of the trainer or of all replicas,
    `age_s` seconds ago.
    """

    title: str
    total: float
    parts: tuple[AccountPart, ...]
    residual: float
    residual_share: float
    age_s: float = 0.0

    @property
    def total_text(self) -> str:
        """The total with its unit."""
        return f"{self.total:,.0f}" + ("" if self.title == "tokens" else " s")

    @property
    def parts_text(self) -> str:
        """All parts and the residual, such as ``trained 61.2%, pending 3.0%; unaccounted 0.0%``.

        The age follows if it is half a second or more.
        """
        parts = ", ".join(f"{part.name} {_percent(part.share)}" for part in self.parts)
        age = f", {self.age_s:.0f} s ago" if self.age_s >= _MIN_AGE_S else ""
        return f"{parts or 'none'}; unaccounted {_percent(self.residual_share)}{age}"


def account_views(accounts: Mapping[str, float]) -> tuple[AccountView, ...]:
    """Return the accounts with a total and a residual.

    Args:
        accounts: the numbers, by the names of `accounts.json`.
    """
    return tuple(
        AccountView(
            title,
            accounts[total],
            _parts(accounts, prefix, accounts[total]),
            accounts[residual],
            accounts.get(f"{residual}_share", 0.0),
            accounts.get(f"{title}_age_s", 0.0),
        )
        for title, prefix, total, residual in _ACCOUNTS
        if total in accounts and residual in accounts
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _parts(accounts: Mapping[str, float], prefix: str, total: float) -> tuple[AccountPart, ...]:
    parts = [
        AccountPart(name.removeprefix(prefix).replace("_", " "), amount, amount / total)
        for name, amount in accounts.items()
        if name.startswith(prefix) and total > 0
    ]
    shown_parts = (part for part in parts if part.share >= _MIN_SHARE)
    return tuple(sorted(shown_parts, key=lambda part: (-part.share, part.name)))


def write_summary(run_dir: Path, numbers: Mapping[str, object]) -> None:
    """Write a run's summary; others see the former one or this one, never half of it.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    text = json.dumps(numbers, indent=2) + "\n"
    write_whole(run_dir / SUMMARY_NAME, text.encode())


def remove_end_files(run_dir: Path) -> None:
    """Remove what says how an earlier run in this folder ended, and the marks of its processes.

    The mark of a process that lives stays, if it is of this machine.
    """
    for name in (ACCOUNTS_NAME, SUMMARY_NAME):
        (run_dir / name).unlink(missing_ok=True)
    with suppress(OSError):  # not ours, not empty, or none
        for mark in process_marks(run_dir):
            if mark.state() in ENDED or mark.host != host_of_pids():
                mark_file(run_dir, mark.name).unlink(missing_ok=True)
        (run_dir / MARKS_FOLDER).rmdir()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary that the end of a run wrote; empty: there is none.

    A start removes the one of the run before it.
    """
    try:
        summary = json.loads((run_dir / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) and _OF_AN_END in summary else {}


def software_versions() -> dict[str, str]:
    """Return versions by name; an absent package is left out, and so is an unknown commit."""
    software = {"sluice": own_version()}
    commit = _commit()
    if commit:
        software["commit"] = commit
    software["python"] = f"{platform.python_version()} ({platform.platform()})"
    versions = {name: installed_version(name) for name in _PACKAGES}
    return software | {name: version for name, version in versions.items() if version is not None}


def versions_of_run(run_dir: Path) -> Mapping[str, str]:
    """Return the versions that a run noted at its end; those of this process before."""
    noted = read_summary(run_dir).get("versions")
    if not isinstance(noted, dict):
        return software_versions()
    return {str(name): str(value) for name, value in noted.items()}


@cache
def _commit() -> str:
    """Return the commit of the checkout that holds this file; empty: it is in none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_S, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
