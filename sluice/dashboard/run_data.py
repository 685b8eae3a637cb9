"""What the page shows of a run's folder, for both exits: the server and the exported file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.config.schema.trainer import TrainerConfig
from sluice.dashboard.curves import curve_points
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.overview import overview, read_final_accounts
from sluice.dashboard.page import group_object, page_object
from sluice.dashboard.sample_browser import (
    READ_S,
    PageCursor,
    SampleBrowser,
    SampleFilter,
    folders_of_run,
)
from sluice.dashboard.sample_lines import DumpRow, dump_row, truth_text
from sluice.dashboard.side_by_side import ComparedRun, metric_of_runs, settings_object, side_by_side
from sluice.dashboard.step_history import StepHistory
from sluice.report.summary import versions_of_run
from sluice.telemetry.metric_names import find_metric

NO_POINTS = 1
_EXAMPLES = "validation"
_NUM_PAIRS = 8
_MAX_EXAMPLE_BYTES = 4 << 20  # of a file; examples of a validation are far smaller
_LOGS, _LOG_SUFFIX = "logs", ".log"
_MAX_LOG_BYTES, _MAX_LOG_LINES = 128 << 10, 400
_FIRST_LOGS = ("trainer", "reward")


def compare_folders(folders: Sequence[Path], max_points: int) -> dict[str, Any]:
    """Read the runs to their end; return them side by side, with at most `max_points` an axis.

    Raises:
        OSError: a file cannot be read.
    """
    runs = [ComparedRun(folder, StepHistory(folder)) for folder in folders]
    for run in runs:
        while run.history.read():
            pass
    return side_by_side(runs, max_points)


class RunData:
    """The answers of the page. Only one thread at a time may call its methods.

    Args:
        run_dir: the run's folder.
        trainer: of its configuration: the number of steps, and the folder of validations.
        clock: seconds, monotonic.
        other_runs: folders of runs to show beside it.
    """

    def __init__(
        self,
        run_dir: Path,
        trainer: TrainerConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        other_runs: Sequence[Path] = (),
    ) -> None:
        self._run_dir = run_dir
        self._total_steps = trainer.total_training_steps
        self._clock = clock
        self._history = StepHistory(self._run_dir)
        self._runs = (
            ComparedRun(run_dir, self._history),
            *(ComparedRun(folder, StepHistory(folder)) for folder in other_runs),
        )
        self._browser = SampleBrowser(folders_of_run(run_dir, trainer.validation_data_dir), clock)
        self._is_behind = True

    def read(self) -> bool:
        """Read new content of the files for a bounded time; return whether more is there already.

        Raises:
            OSError: a folder or file cannot be read.
        """
        ends_s = self._clock() + READ_S
        is_behind = False
        for run in self._runs:
            while (has_more := run.history.read()) and self._clock() < ends_s:
                pass
            is_behind = is_behind or has_more
        self._is_behind = self._browser.read() or is_behind
        return self._is_behind

    def overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        """Return the page's first lines, the fleet and the accounting."""
        name, accounts = self._run_dir.absolute().name, read_final_accounts(self._run_dir)
        return {
            **overview(name, self._total_steps, accounts, self._history, live),
            "num_unread_lines": self._history.num_unread + self._browser.num_unread,
            "is_reading": self._is_behind,
        }

    def curves(self, max_points: int) -> dict[str, Any]:
        """Return curves and composition in at most `max_points` points."""
        return curve_points(self._history, max_points)

    def metrics(self) -> dict[str, Any]:
        """Return every metric of the runs, with unit, meaning and newest value."""
        names = sorted({name for run in self._runs for name in run.history.names})
        return {"metrics": [self._describe_metric(name) for name in names]}

    def _describe_metric(self, name: str) -> dict[str, Any]:
        metric, newest = find_metric(name), self._history.newest.get(name)
        return {
            "name": name,
            "unit": metric.unit if metric else "",
            "meaning": metric.meaning if metric else "",
            "newest": newest,
        }

    def metric(self, name: str, max_points: int) -> dict[str, Any]:
        """Return the points of one metric of each run."""
        return metric_of_runs(self._runs, name, max_points)

    def runs(self, max_points: int) -> dict[str, Any]:
        """Return the runs side by side."""
        return side_by_side(self._runs, max_points)

    def settings(self) -> dict[str, Any]:
        """Return the configuration by key, with defaults, and the versions of the software."""
        return {**settings_object(self._run_dir), "versions": versions_of_run(self._run_dir)}

    def log(self, service: str) -> dict[str, Any]:
        """Return the newest lines of a service's log."""
        return log_tail(self._run_dir, service)

    def comparison(self) -> dict[str, Any]:
        """Return responses of the first and of the last validation to the same problems."""
        return compare_validations(self._run_dir, self._history.validated_steps())

    def samples(
        self, sample_filter: SampleFilter, text: str, after: PageCursor | None, max_groups: int
    ) -> dict[str, Any]:
        """Return some groups of the list, and the number of all groups by outcome."""
        page = self._browser.page(sample_filter, text, after=after, limit=max_groups)
        return page_object(page, self._browser.counts)

    def group(self, ordinal: int) -> dict[str, Any] | None:
        """Return one group with its texts; ``None``: it is not there."""
        group = self._browser.group(ordinal)
        return None if group is None else group_object(group)


def compare_validations(run_dir: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Return ``before`` and ``after`` (steps), and ``pairs`` of responses to the same problem.

    Args:
        run_dir: the run's folder.
        steps: those with a validation, rising. Without two that recorded examples there are no
            pairs.
    """
    if len(steps) < 2:
        return {"before": None, "after": None, "pairs": []}
    before, after = (
        {
            example.input: example
            for example in _read_examples(run_dir / _EXAMPLES / f"{step}.jsonl")
        }
        for step in (steps[0], steps[-1])
    )
    shared = (prompt for prompt in before if prompt in after)
    pairs = [
        {
            "prompt": prompt,
            "ground_truth": truth_text(before[prompt].gts),
            "before": _response_object(before[prompt]),
            "after": _response_object(after[prompt]),
        }
        for prompt in islice(shared, _NUM_PAIRS)
    ]
    return {"before": steps[0], "after": steps[-1], "pairs": pairs}


def _response_object(example: DumpRow) -> dict[str, Any]:
    return {"text": example.output, "score": example.score}


def _read_examples(file: Path) -> Iterator[DumpRow]:
    """Yield the rows at the beginning of a file; none if it cannot be read."""
    try:
        with file.open("rb") as opened:
            lines = opened.read(_MAX_EXAMPLE_BYTES).split(b"\n")[:-1]
    except OSError:
        return
    yield from filter(None, map(dump_row, lines))


def log_names(run_dir: Path) -> list[str]:
    """Return the services with a log: trainer and reward service first."""
    try:
        files = [
            entry.name
            for entry in os.scandir(run_dir / _LOGS)
            if entry.is_file(follow_symlinks=False)
        ]
    except OSError:
        return []
    names = [name.removesuffix(_LOG_SUFFIX) for name in files if name.endswith(_LOG_SUFFIX)]
    first_names = _FIRST_LOGS
    return sorted(
        names, key=lambda name: (not name.startswith(first_names), name != first_names[0], name)
    )


def log_tail(run_dir: Path, service: str) -> dict[str, Any]:
    """Return the newest lines of a service's log, and the services that have one.

    Args:
        run_dir: the run's folder.
        service: one of `log_names`; for any other there are no lines.
    """
    names = log_names(run_dir)
    lines: list[str] = []
    is_cut = False
    if service in names:
        try:
            with (run_dir / _LOGS / f"{service}{_LOG_SUFFIX}").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = max(0, size - _MAX_LOG_BYTES)
                file.seek(begin)
                text = file.read(_MAX_LOG_BYTES).decode(errors="replace")
        except OSError as error:
            text, begin = f"cannot be read: {error}\n", 0
        lines = text.split("\n")
        if begin:  # the first one lacks its beginning; without another one its end is shown
            lines = lines[1:] if any(lines[1:]) else [f"... {lines[0]}"]
        is_cut = begin > 0 or len(lines) > _MAX_LOG_LINES
        lines = [line for line in lines if line][-_MAX_LOG_LINES:]
    return {"services": names, "service": service, "lines": lines, "is_cut": is_cut}
