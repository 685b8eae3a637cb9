"""Lines that show how far a run is, while it starts, waits, trains, validates and saves, and what a
person who watched it would say about its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sluice.client.run_monitor import RunSnapshot
from sluice.telemetry import metric_names
from sluice.telemetry.metric_names import GROUPS_ALL_RIGHT, GROUPS_ALL_WRONG, GROUPS_KEPT

LINE_WIDTH = 120
_STEPS_FOR_ETA = 20
_MESSAGE_WIDTH = 60
# Cells that a long line loses first.
_OPTIONAL_CELLS = ("entropy", "staleness", "length")
_SECONDS_PER_MINUTE, _SECONDS_PER_HOUR, _SECONDS_PER_DAY = 60, 3600, 86400
_LOW_YIELD, _MIN_GROUPS = 0.05, 64
_ONE_SIDED = 0.8


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``40 s``, ``17 min``, ``2 h 05 min``."""
    if seconds < 2 * _SECONDS_PER_MINUTE:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _SECONDS_PER_MINUTE)
    if seconds < 2 * _SECONDS_PER_HOUR:
        return f"{minutes} min"
    if seconds < 2 * _SECONDS_PER_DAY:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / _SECONDS_PER_DAY:.1f} days"


class TimeLeft:
    """Estimates the time that a run still needs from its last steps."""

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=_STEPS_FOR_ETA)

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> str:
        """Take a finished step; return a text such as ``ETA 17 min``, empty without an estimate."""
        if metric_names.STEP_S in metrics:
            self._step_s.append(metrics[metric_names.STEP_S])
        if not self._step_s or step >= total:
            return ""
        mean_s = sum(self._step_s) / len(self._step_s)
        return f"ETA {duration_text(mean_s * (total - step))}"


def step_line(step: int, total: int, metrics: Mapping[str, float], time_left: str = "") -> str:
    """Return one finished step as a line of at most `LINE_WIDTH` columns.

    Args:
        step: its number, which is also the policy version that it made.
        total: steps of the run.
        metrics: of the step; what is missing is left out.
        time_left: the end of the line.
    """
    cells = {"step": f"step {step:>{len(str(total))}}/{total}", **_step_cells(metrics)}
    if time_left:
        cells["eta"] = time_left
    for name in _OPTIONAL_CELLS:
        if len("  ".join(cells.values())) <= LINE_WIDTH:
            break
        cells.pop(name, None)
    return "  ".join(cells.values())


def _step_cells(metrics: Mapping[str, float]) -> dict[str, str]:
    kept, decided = metrics.get(metric_names.GROUPS_KEPT, 0.0), num_decided_groups(metrics)
    forms = {
        "reward": ("reward {:.3f}", metric_names.REWARD),
        "entropy": ("entropy {:.3f}", "actor/entropy"),
        "length": ("length {:.0f}", "response_length/mean"),
        "groups": (f"kept {{:.0f}}/{max(kept, decided):.0f}", metric_names.GROUPS_KEPT),
        "staleness": ("staleness {:.0f}", metric_names.STALENESS_MAX),
        "speed": ("{:,.0f} tok/s", metric_names.TOKENS_PER_S),
        "seconds": ("{:.1f} s/step", metric_names.STEP_S),
    }
    return {
        cell: form.format(metrics[name]) for cell, (form, name) in forms.items() if name in metrics
    }


def starting_line(num_up: int, starting: Mapping[str, str], seconds: float) -> str:
    """Return a line for a run whose trainer does not answer yet.

    Args:
        num_up: processes that serve.
        starting: the last log message of each process that does not serve yet.
        seconds: since the start.
    """
    line = f"starting ({duration_text(seconds)}): {num_up} of {num_up + len(starting)} up"
    for index, (name, log_message) in enumerate(starting.items()):
        message = f": {log_message[:_MESSAGE_WIDTH]}" if log_message else ""
        part = f"; {name}{message}"
        ending = f"; and {len(starting) - index} more"
        if len(line) + len(part) + len(ending) > LINE_WIDTH:
            return line + ending
        line += part
    return line


def state_line(snapshot: RunSnapshot, *, batch_size: int, min_replicas: int) -> str:
    """Return what a run is doing now, in at most `LINE_WIDTH` columns.

    Args:
        snapshot: its state.
        batch_size: groups in a train batch.
        min_replicas: replicas that it waits for before its first step.
    """
    step = f"step {snapshot.step + 1}/{snapshot.total_steps}"
    validated, to_validate = snapshot.validation
    validating = f"validating {validated} of {to_validate} prompts" if to_validate else ""
    tokens_per_s = sum(replica.tokens_per_second for replica in snapshot.replicas)
    doing = {
        "waiting for replicas": f"{len(snapshot.replicas)} of {min_replicas} replicas registered",
        "waiting for batch": (
            f"{step}: batch {min(snapshot.groups.get('kept', 0), batch_size)} of {batch_size} "
            f"groups, {snapshot.groups.get('generating', 0)} generating, "
            f"{tokens_per_s:,.0f} tok/s"
        ),
        "training": f"{step}: training",
        "publishing": f"publishing weights to {len(snapshot.replicas)} replicas",
        "evaluating": validating or "validating",
        "saving": f"saving the checkpoint of step {snapshot.step}",
        "paused": f"paused after step {snapshot.step}",
        "finished": "ending",
    }.get(snapshot.phase, snapshot.phase)
    if validating and snapshot.phase != "evaluating":
        doing += f"; {validating}"
    return f"{doing} ({duration_text(snapshot.phase_seconds)})"


def num_decided_groups(metrics: Mapping[str, float]) -> float:
    """Return the number of groups that the filter kept or dropped for the batch of a step."""
    return sum(metrics.get(name, 0.0) for name in (GROUPS_KEPT, GROUPS_ALL_RIGHT, GROUPS_ALL_WRONG))


def groups_since(
    before: Mapping[str, int], after: Mapping[str, int], kept: int
) -> dict[str, float]:
    """Return the groups that the filter decided about between two states of a run, as metrics.

    A step that finds no mixed groups does not end, so its metrics would come too late.

    Args:
        before: prompts by end, at the last step.
        after: the same at the moment.
        kept: groups that wait for a batch.
    """
    ends = {GROUPS_ALL_RIGHT: "filtered_all_right", GROUPS_ALL_WRONG: "filtered_all_wrong"}
    decided = {name: float(after.get(end, 0) - before.get(end, 0)) for name, end in ends.items()}
    return {GROUPS_KEPT: float(kept), **decided}


def low_yield_notice(metrics: Mapping[str, float]) -> str:
    """Return a notice if less than 5 % of a step's groups were mixed; empty otherwise.

    Args:
        metrics: of one step.
    """
    kept, decided = metrics.get(GROUPS_KEPT, 0.0), num_decided_groups(metrics)
    if decided < _MIN_GROUPS or kept >= _LOW_YIELD * decided:
        return ""
    right = metrics.get(GROUPS_ALL_RIGHT, 0.0) / decided
    wrong = metrics.get(GROUPS_ALL_WRONG, 0.0) / decided
    advice = "most of the sampled tokens train nothing"
    if right >= _ONE_SIDED:
        advice = "the data has become too easy: use harder prompts, or end the run"
    elif wrong >= _ONE_SIDED:
        advice = "the data is too hard: use easier prompts, or check the reward function"
    return (
        f"only {kept / decided:.1%} of the groups are mixed ({right:.0%} all right, "
        f"{wrong:.0%} all wrong): {advice}"
    )
