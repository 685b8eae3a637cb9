"""`sluice.evaluation`: a run that grades a model's files and trains nothing."""

from __future__ import annotations

import msgspec

from sluice.config.schema.section import Section


class EvaluationConfig(Section, frozen=True):
    """A stand-alone evaluation; `sluice eval --model` sets its keys."""

    benchmarks: list[str] = msgspec.field(default_factory=list)
    """Names of data.val_files, in their order. Set: the run is an evaluation of
    actor_rollout_ref.model.path, without a trainer, that stores each finished prompt in
    responses/NAME.jsonl below sluice.run_dir and skips it after a restart; empty: it trains.
    """
