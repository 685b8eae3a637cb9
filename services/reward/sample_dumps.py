"""Responses written to files for reading (`trainer.rollout_data_dir`, `validation_data_dir`).

A folder that cannot be written never stops a run: it is told once, and nothing is lost but the
files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from sluice.config.trainer import TrainerConfig
from sluice.telemetry.sample_dump import DumpedSample, write_dump
from sluice.types import GradedGroup, Outcome, Prompt, Rollout, RolloutGroup, Scored

logger = logging.getLogger(__name__)


class SampleDumps:
    """``<folder>/<step>.jsonl``, a row a graded response.

    Args:
        training: gets trained batches; ``None``: they are not written.
        validation: gets validations.
    """

    def __init__(self, training: Path | None, validation: Path | None) -> None:
        self._training, self._validation = training, validation
        self._broken: set[Path] = set()

    async def trained(self, groups: Sequence[GradedGroup], step: int) -> None:
        """Write the batch of `step`."""
        if self._training is not None and groups:
            samples = [
                sample
                for graded in groups
                for sample in _samples(graded.group.prompt, graded.group.rollouts, graded.outcomes)
            ]
            await self._write(self._training, samples, step)

    def of_validation(
        self, group: RolloutGroup, outcomes: Sequence[Outcome]
    ) -> tuple[DumpedSample, ...]:
        """What `validated` is to be given of a group; nothing if validations are not written."""
        if self._validation is None:
            return ()
        return tuple(_samples(group.prompt, group.rollouts, outcomes))

    async def validated(self, samples: list[DumpedSample], step: int) -> None:
        """Write a validation of the version after `step`; a later one of it replaces it."""
        if self._validation is not None:
            await self._write(self._validation, samples, step)

    async def _write(self, folder: Path, samples: list[DumpedSample], step: int) -> None:
        try:
            await asyncio.to_thread(write_dump, folder, samples, step)
        except OSError as error:
            if folder not in self._broken:
                logger.warning("samples are not written: %s; free the disk or the folder", error)
            self._broken.add(folder)


def sample_dumps(trainer: TrainerConfig) -> SampleDumps:
    """As configured."""
    folders = (trainer.rollout_data_dir, trainer.validation_data_dir)
    return SampleDumps(*(None if folder is None else Path(folder) for folder in folders))


def _samples(
    prompt: Prompt, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome]
) -> list[DumpedSample]:
    """The graded ones."""
    return [
        DumpedSample(
            input="\n".join(message.content for message in prompt.messages),
            output=rollout.text,
            gts=prompt.ground_truth,
            score=outcome.score,
            extras={**outcome.metrics, "reward": outcome.reward, "uid": prompt.prompt_id},
        )
        for rollout, outcome in zip(rollouts, outcomes, strict=True)
        if isinstance(outcome, Scored)
    ]
