"""Fit a simulation's workload, fleet and trainer to a run: `groups.jsonl`, `metrics.jsonl`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np

from benchmarks.simulator.group_records import GROUPS_NAME, GroupRecord, read_groups
from services.reward.groups.settings import sampling_rules
from sluice.algorithm.sampling.admission import YieldFloor
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, DataError
from sluice.report.run_record import RunRecord, read_progress
from sluice.service_contract import CONFIG_NAME
from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import simulate
from sluice.simulate.settings import FleetSettings, SimulationSettings, TrainerSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples

NUM_NEIGHBOURS = 128
"""Groups to sample from: those with the nearest versions, since the policy learns."""

LONG_SHARE = 0.1

_NUM_SAMPLE_GROUPS = 2000
"""Groups that step times are fitted to: the last ones."""
_OUTAGE_FACTOR = 10.0
"""A wait beyond so many medians is an outage, not a hand-over."""

# A record does not hold how many sequences ran at each moment, so step times read off it are a
# little wrong. Tokens per busy second are exact: a few simulations scale the step times to them.
NUM_ROUNDS = 3


class FittedWorkload:
    """Recorded groups in their order of start.

    Beyond these it samples groups of about the same version, with replacement.

    Args: records are kept or filtered ones, at least one; the seed decides which sample comes when.
    """

    def __init__(self, records: Sequence[GroupRecord], seed: int = 0) -> None:
        self._records = sorted(records, key=lambda record: record.started_s)
        self._by_version = sorted(range(len(records)), key=lambda number: self._version(number))
        self._versions = [self._version(number) for number in self._by_version]
        self._seed = seed
        means = np.array([np.mean(record.tokens) for record in self._records])
        self._are_long = means > np.quantile(means, 1.0 - LONG_SHARE)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """Return the prompt; see `Workload`."""
        is_recorded = position < len(self._records)
        number = position if is_recorded else self._neighbour(position, version)
        record = self._records[number]
        return SimulatedPrompt(
            record.key, record.right / record.scored, bool(self._are_long[number]), number
        )

    def _version(self, number: int) -> int:
        return self._records[number].oldest_version or 0

    def _neighbour(self, position: int, version: int) -> int:
        size = min(NUM_NEIGHBOURS, len(self._records))
        middle = bisect_left(self._versions, version)
        last = bisect_left(self._versions, version + 1)
        first = min(max(0, (middle + last - size) // 2), len(self._records) - size)
        low, high = min(first, middle), max(first + size, last)
        draws = np.random.default_rng([self._seed, 4, position])
        return self._by_version[int(draws.integers(low, high))]

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """Return the samples; see `Workload`. Beyond the recorded ones, sample from them."""
        record = self._records[prompt.number]
        draws = np.random.default_rng([self._seed, 5, position, num_restarts])
        num_recorded = min(len(record.tokens), record.scored)
        order = draws.permutation(num_recorded)
        more = draws.integers(0, num_recorded, max(0, num_samples - num_recorded))
        chosen = np.concatenate([order, more])[:num_samples]
        tokens = np.maximum(1, np.array(record.tokens))[chosen]
        are_right = (chosen < record.right).tolist()
        return SimulatedSamples(tokens.tolist(), are_right, _values(record, len(chosen)))


def _values(record: GroupRecord, num_samples: int) -> list[float] | None:
    """Return values of the filter's metric; ``None`` where the grades decide how the group ended.

    Which samples differed is not recorded, so these stand for the whole group only.
    """
    if record.is_decided_by_grades and record.scored >= min(num_samples, 2):
        return None
    return [float(number) if record.is_kept else 0.0 for number in range(num_samples)]


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A run and what its record contains.

    Args:
        groups: those that were kept or filtered, each once; at least one.
        record: the trainer's numbers.
        fleet: replicas and step times.
        trainer: times of a step.
    """

    groups: list[GroupRecord]
    record: RunRecord
    fleet: FleetSettings
    trainer: TrainerSettings


def fit_run(run_dir: Path, *, slots: int, slack: float) -> FittedRun:
    """Fit the fleet and the trainer to a run.

    Args:
        run_dir: the run's folder.
        slots: sequences that a replica generates at once, from the configuration.
        slack: sequences in flight per slot, likewise.

    Raises:
        DataError: the record is missing, too short, or cannot be read.
    """
    file, record = run_dir / GROUPS_NAME, read_progress(run_dir)
    # What has failed took its time; but it does not come again.
    recorded = read_groups(file)
    groups = [group for group in recorded if group.is_kept is not None]
    if not groups:
        raise DataError(f"{file}: no group was kept or filtered; let the run train some steps")
    if len(record.steps) < 2:
        raise DataError(
            f"{run_dir}: the record of {len(record.steps)} steps is too short; at least 2 are "
            "needed"
        )
    num_replicas = max(1, round(record.maximum("rollout/replicas")))
    fleet = _fleet(recorded, num_replicas, slots, slack)
    return FittedRun(groups, record, fleet, _trainer(record))


def _trainer(record: RunRecord) -> TrainerSettings:
    """Fit the times of a step: what is neither waiting nor training counts as publication.

    Where publications overlap steps, their own time counts.
    """
    train = [row.get("timing_s/train") or 0.0 for row in record.steps]
    step, wait = record.total("timing_s/step"), record.total("timing_s/wait_batch")
    delivery_s = record.total("weights/delivery_s") / len(train)
    publish_s = max(0.0, (step - wait) / len(train) - fmean(train), delivery_s)
    stall_s = min(record.total("weights/stall_s") / len(train), publish_s)
    return TrainerSettings(fmean(train), pstdev(train), publish_s, stall_s, _handover_s(record))


def _handover_s(record: RunRecord) -> float:
    """Return the mean wait for batches that were formed already; 0 if it is not recorded.

    Waits far beyond the median are left out: a reward service died meanwhile and was started again.
    """
    waits = [
        max(0.0, (row.get("timing_s/wait_batch") or 0.0) - in_groups)
        for row in record.steps
        if (in_groups := row.get("timing_s/wait_groups")) is not None
    ]
    if not waits:
        return 0.0
    longest_s = _OUTAGE_FACTOR * median(waits)
    return fmean(wait for wait in waits if wait <= longest_s)


def _fleet(
    groups: Sequence[GroupRecord], num_replicas: int, slots: int, slack: float
) -> FleetSettings:
    base_s, per_sequence_s = _step_time(groups, slots)
    return FleetSettings(
        num_replicas=num_replicas,
        slots=slots,
        slack=slack,
        base_step_s=base_s,
        per_sequence_s=per_sequence_s,
        grading_s=_grading_s(groups),
    )


def _grading_s(groups: Sequence[GroupRecord]) -> float:
    """Return the median of filtered groups: kept ones end when they are trained."""
    waits = [
        group.ended_s - group.generated_s
        for group in groups
        if group.is_kept is False and group.generated_s is not None
    ]
    return max(0.0, median(waits)) if waits else 0.0


def tokens_per_busy_s(record: RunRecord) -> float | None:
    """Return the tokens of a replica's busy second; ``None`` if that is not recorded."""
    tokens = busy_s = 0.0
    for row in record.steps:
        step_s = row.get("timing_s/step") or 0.0
        busy_share = 1.0 - (row.get("rollout/idle_share") or 0.0)
        tokens += (row.get("rollout/tokens_per_s") or 0.0) * step_s
        busy_s += busy_share * step_s * (row.get("rollout/replicas") or 1.0)
    return tokens / busy_s if tokens and busy_s else None


def _step_time(groups: Sequence[GroupRecord], slots: int) -> tuple[float, float]:
    """Return the seconds of a step, and those that each running sequence adds.

    A group's time per token of its longest sample is the mean step time while it ran; a line
    through these over the mean number of sequences beside it, least squares, no negative term.
    """
    by_replica: dict[str, list[GroupRecord]] = defaultdict(list)
    for group in groups[-_NUM_SAMPLE_GROUPS:]:
        by_replica[group.replicas[0] if group.replicas else ""].append(group)
    profiles = [_Concurrency(of_replica, slots) for of_replica in by_replica.values()]
    points = [profile.point(group) for profile in profiles for group in profile.groups]
    usable = np.array([point for point in points if point is not None], dtype=np.float64)
    if not usable.size:
        raise DataError("groups.jsonl: no group took any time; the step time cannot be fitted")
    x, y, weight = usable.T
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = np.average((x - mean_x) ** 2, weights=weight)
    slope = np.average((x - mean_x) * (y - mean_y), weights=weight) / spread if spread > 1e-9 else 0
    slope = min(max(float(slope), 0.0), float(mean_y / max(mean_x, 1e-9)))
    return float(mean_y - slope * mean_x), slope


class _Concurrency:
    """Sequences that ran on a replica over time: each as long as its share of the longest."""

    def __init__(self, groups: Sequence[GroupRecord], slots: int) -> None:
        self.groups = groups
        starts, ends = [], []
        for group in groups:
            begin, end = _span(group)
            longest = max(group.tokens)
            starts += [begin] * len(group.tokens)
            ends += [begin + (end - begin) * tokens / max(longest, 1) for tokens in group.tokens]
        times = np.concatenate([starts, ends])
        changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        running = np.minimum(np.cumsum(changes[order]), slots)[:-1]
        self._until = np.concatenate([[0.0], np.cumsum(running * np.diff(self._times))])

    def point(self, group: GroupRecord) -> tuple[float, float, float] | None:
        """Return mean sequences while a group ran, seconds per token, and its weight (tokens)."""
        (begin, end), longest = _span(group), max(group.tokens)
        if end <= begin or not longest:
            return None
        area = np.interp([begin, end], self._times, self._until)
        return float(area[1] - area[0]) / (end - begin), (end - begin) / longest, float(longest)


def _span(group: GroupRecord) -> tuple[float, float]:
    assert group.generated_s is not None
    return group.started_s, max(group.started_s, group.generated_s)


def calibrated(fitted: FittedRun, settings: SimulationSettings) -> SimulationSettings:
    """Return the settings with step times scaled to the run's tokens per busy second.

    Args:
        fitted: the run.
        settings: of its simulation.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    measured = tokens_per_busy_s(fitted.record)
    if measured is None:
        return settings
    for _ in range(NUM_ROUNDS):
        recorder = SimulationRecorder()
        workload = FittedWorkload(fitted.groups, settings.seed)
        simulate(as_issued(settings), workload, recorder)
        last = recorder.steps[-1]
        scale = last.generated / last.busy_s / measured
        fleet = settings.fleet
        fleet = replace(
            fleet,
            base_step_s=fleet.base_step_s * scale,
            per_sequence_s=fleet.per_sequence_s * scale,
        )
        settings = replace(settings, fleet=fleet)
    return settings


def as_issued(settings: SimulationSettings) -> SimulationSettings:
    """Return the settings without pacing: the workload has the order of the run's groups."""
    return replace(settings, rules=replace(settings.rules, paces=False))


def fitted_simulation(run: Path) -> tuple[FittedRun, SimulationSettings]:
    """Fit a simulation of as many steps as the run has trained to its record.

    Args:
        run: the run's folder.

    Raises:
        ConfigError: nothing was started from there, or the configuration is not the recorded run's.
        DataError: its record is missing, too short, cannot be read, or is of a strategy that leaves
            samples or prompts out.
    """
    file = run / CONFIG_NAME
    if not file.is_file():
        raise ConfigError(f"{run} holds no {CONFIG_NAME}; give the folder of a started run")
    config = load_config(file, ())
    fitted = fit_run(
        run,
        slots=config.actor_rollout_ref.rollout.max_num_seqs,
        slack=config.sluice.reward.inflight_slack,
    )
    _check_filter(config, fitted, file)
    return fitted, calibrated(fitted, _settings(config, fitted))


def _settings(config: RunConfig, fitted: FittedRun) -> SimulationSettings:
    group_filter, rules = config.algorithm.filter_groups, sampling_rules(config)
    probes = max(1, min(rules.probe_samples, rules.samples_per_group - 1))
    return SimulationSettings(
        replace(rules, max_num_gen_batches=0, probe_samples=probes, seed=0),
        on_stale=config.sluice.asynchrony.on_stale,
        fleet=fitted.fleet,
        trainer=fitted.trainer,
        num_steps=len(fitted.record.steps),
        # Steps of a short run are few: only the first one, which starts with nothing, is left out.
        warmup_steps=0,
        filters_groups=group_filter.enable,
        yield_floor=YieldFloor(group_filter.min_yield, group_filter.min_yield_groups),
    )


def _check_filter(config: RunConfig, fitted: FittedRun, file: Path) -> None:
    """Refuse a record with filtered groups if the configuration has no filter."""
    filtered = [group for group in fitted.groups if group.is_kept is False]
    if filtered and not config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"{file}: algorithm.filter_groups.enable = false, but {GROUPS_NAME} beside it has "
            f"{len(filtered)} groups that were filtered (such as {filtered[0].prompt_id}: "
            f"{filtered[0].end}); put the configuration there that these were recorded with"
        )
