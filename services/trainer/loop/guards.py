"""The guards of a run: their record on disk, and their interface to the train loop.

`sluice.algorithm.guards` decides. This module gives it signals, keeps them in
``<checkpoints>/guards.json`` and says which checkpoints stay. Signals of train steps are not in the
file: a restarted trainer begins to collect them again.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from services.trainer.learner.checkpoint import Checkpoint
from services.trainer.loop.run_state import RunState
from services.trainer.metrics.sinks import ValidationReport
from sluice.algorithm.guards import (
    ACCURACY,
    VALIDATION_PREFIX,
    GuardAction,
    GuardRecord,
    GuardRule,
    Judgement,
    Rollback,
    RuleState,
    Signal,
    Verdict,
    best_steps,
    decide,
    judge,
    signal_of,
)
from sluice.config.schema.service import GuardsConfig, KeepConfig
from sluice.whole_file import write_whole

logger = logging.getLogger(__name__)

RECORD_FILE = "guards.json"


class RunGuards:
    """The guards of one run; used from one event loop, but for `steps_to_protect`.

    Args:
        file: the file of their record.
        state: paused by the guards; shows their judgements.
    """

    def __init__(
        self, config: GuardsConfig, file: Path, state: RunState, record: GuardRecord
    ) -> None:
        self._keep: KeepConfig = config.keep
        self.rules = tuple(
            msgspec.convert(msgspec.to_builtins(rule), GuardRule) for rule in config.rules
        )
        self._file = file
        self._state = state
        self._record = record
        self._validating: int | None = None
        self._has_held = False
        self._warned = set[str]()
        state.judgements = self.judgements

    @property
    def learning_rate_factor(self) -> float:
        """The factor on the learning rate after all rollbacks so far."""
        return self._record.learning_rate_factor

    def steps_to_protect(self, saved: Collection[int]) -> Collection[int]:
        """Return the steps whose checkpoints stay: the best, and the one being validated.

        Args:
            saved: steps of the checkpoints on disk.
        """
        validating = self._validating
        best = self._best(saved, self._keep.top)
        return best if validating is None else (*best, validating)

    def note_saved(self, step: int) -> None:
        """Note that this run has a checkpoint of `step`."""
        steps = dict.fromkeys((*self._record.saved, step))
        self._record = replace(self._record, saved=tuple(steps))
        self._write()

    def note_validating(self, step: int | None) -> None:
        """Note that the weights after `step` are being validated (``None``: none are)."""
        self._validating = step

    def note_validated(self, step: int, report: ValidationReport) -> None:
        """Record the metrics of a validation."""
        self._note(step, report.metrics, report.standard_errors, of_validation=True)
        self._write()

    def note_failed_validation(self, step: int, why: str) -> None:
        """Note that a validation failed: it says nothing about the policy."""
        absent = Signal(step, absence=f"the validation of step {step} failed: {why}")
        self._add(dict.fromkeys(self._names(of_validation=True), absent))
        self._write()

    def note_step(self, step: int, row: Mapping[str, float]) -> None:
        """Record the metrics of a train step."""
        self._note(step, row, {}, of_validation=False)

    @property
    def is_due(self) -> bool:
        """Return whether a broken rule can be acted on now."""
        return not (self._state.is_paused or self._has_held) and self.is_broken

    @property
    def is_broken(self) -> bool:
        """Return whether the newest values break a rule."""
        return any(judgement.state is RuleState.BROKEN for _, judgement in self.judgements())

    def has_validated(self, step: int) -> bool:
        """Return whether a validation of `step` returned a watched metric."""
        names = self._names(of_validation=True)
        signals = [signal for name in names for signal in self._record.signals.get(name, ())]
        return any(signal.step == step and signal.value is not None for signal in signals)

    def restored_step(self, version: int) -> int | None:
        """Return the step whose weights a version has after a rollback; ``None`` for its own."""
        by_version = {rollback.version: rollback.restored for rollback in self._record.rollbacks}
        return by_version.get(version)

    def verdict(self, saved: Callable[[], Collection[int]]) -> Verdict | None:
        """Return the action of a broken rule; ``None`` if there is none, or the run is paused or
        over."""
        if self._state.is_paused or self._state.is_over:  # a holder may need this version
            return None
        if self._has_held:  # a user has resumed: earlier values no longer count
            self._has_held = False
            self._ignore_past()
        if not self.is_due:
            return None
        steps = saved()
        verdict = decide(self.rules, self._record, self._best(steps, len(steps)))
        self._has_held = verdict is not None and verdict.action is GuardAction.HOLD
        return verdict

    def note_rollback(self, verdict: Verdict, version: int) -> float:
        """Note that `version` has the weights that the verdict restores; write it to disk.

        Returns:
            the factor on the learning rate from now on.
        """
        done = Rollback(version, verdict.restores, verdict.learning_rate_factor, verdict.reason)
        self._record = replace(self._record, rollbacks=(*self._record.rollbacks, done))
        self._write()
        return self.learning_rate_factor

    def judgements(self) -> Sequence[tuple[GuardRule, Judgement]]:
        """Return the state of each rule."""
        return [(rule, judge(rule, self._record)) for rule in self.rules]

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the guards' metrics of a step; none without rules."""
        if not self.rules:
            return {}
        states = [judgement.state for _, judgement in self.judgements()]
        return {
            "guards/rollbacks": float(len(self._record.rollbacks)),
            "guards/learning_rate_factor": self.learning_rate_factor,
            "guards/steps_in_weights": float(self._record.steps_in_weights(step)),
            "guards/without_signal": float(states.count(RuleState.NO_SIGNAL)),
        }

    def describe_best(self, saved: Collection[int]) -> str:
        """Return a text about the best checkpoint; empty if none was validated."""
        best = self._best(saved, 1)
        signals = [signal for signal in self._best_signals() if best and signal.step == best[0]]
        return f"the best checkpoint has {self._best_metric}: {signals[-1].text}" if signals else ""

    def _best(self, saved: Collection[int], top: int) -> tuple[int, ...]:
        candidates = set(self._record.saved).intersection(saved)
        return best_steps(self._best_signals(), self._keep.better, candidates, top)

    @property
    def _best_metric(self) -> str:
        return self._keep.metric or ACCURACY

    def _best_signals(self) -> Sequence[Signal]:
        return self._record.signals.get(self._best_metric, ())

    def _names(self, *, of_validation: bool) -> dict[str, str | None]:
        """Return the metrics that are watched, by their name in the record."""
        watched = [self._keep.metric, *(rule.metric for rule in self.rules)]
        return {
            name or ACCURACY: name
            for name in watched
            if (name is None or name.startswith(VALIDATION_PREFIX)) == of_validation
        }

    def _note(
        self,
        step: int,
        row: Mapping[str, float],
        errors: Mapping[str, float],
        *,
        of_validation: bool,
    ) -> None:
        names = self._names(of_validation=of_validation)
        signals = {key: signal_of(name, step, row, errors) for key, name in names.items()}
        for key, signal in signals.items():
            if signal.value is None and key not in self._warned:
                self._warned.add(key)
                logger.warning(
                    "sluice.guards watches '%s', and %s%s; the guard does nothing until it appears",
                    key,
                    signal.absence,
                    _nearest(key, row),
                )
        self._add(signals)

    def _add(self, signals: Mapping[str, Signal]) -> None:
        self._record = self._record.with_signals(signals)
        self._state.wake()

    def _ignore_past(self) -> None:
        """Ignore all values so far; a validation that still runs may break a rule."""
        newest = {name: rows[-1].step for name, rows in self._record.signals.items() if rows}
        self._record = replace(self._record, resumed_after=newest)
        self._write()

    def _write(self) -> None:
        of_validations = self._names(of_validation=True)
        signals = {n: s for n, s in self._record.signals.items() if n in of_validations}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, msgspec.json.encode(replace(self._record, signals=signals)))
        except OSError as error:
            logger.warning("%s is not written; a restart forgets it: %s", self._file, error)


def read_record(checkpoint: Checkpoint | None) -> GuardRecord:
    """Return the record of the checkpoint's run as of its step, or an empty one."""
    if checkpoint is None:
        return GuardRecord()
    file = checkpoint.actor.parent.parent / RECORD_FILE
    record = GuardRecord()
    try:
        record = msgspec.json.decode(file.read_bytes(), type=GuardRecord)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read, the guards begin without a past: %s", file, error)
    record = record.until_step(checkpoint.step)
    # A trainer that was killed after a save may not have noted it.
    return replace(record, saved=tuple(dict.fromkeys((*record.saved, checkpoint.step))))


def _nearest(name: str, candidates: Collection[str]) -> str:
    names = difflib.get_close_matches(name, candidates, n=3)
    return f" (nearest: {', '.join(names)})" if names else ""
