"""Sends the run's numbers to all sinks and its examples to files."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.trainer.metrics.generations import Generation, choose_generations
from services.trainer.metrics.guarded_sink import MetricSink
from services.trainer.reward_client import Evaluation

logger = logging.getLogger(__name__)


class Reporter:
    """The run's record on disk. A file that cannot be written is a warning, not the run's end.

    Args:
        sinks: take every metric.
        run_dir: gets `validation/<step>.jsonl` and `accounts.json`.
        shown_generations: validation samples that sinks show (``trainer.log_val_generations``).
    """

    def __init__(
        self, sinks: Sequence[MetricSink], run_dir: Path, shown_generations: int = 0
    ) -> None:
        self._sinks, self._run_dir = tuple(sinks), run_dir
        self._shown_generations = shown_generations
        self._has_warned = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def evaluation(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """Records validation numbers of the version after `step`, and its examples."""
        metrics = {**evaluation.metrics, "timing_s/testing": seconds, "val/failed": 0.0}
        metrics["val/generated_tokens"] = float(evaluation.generated_tokens)
        self.step(step, metrics)
        rows = [
            {"input": e.prompt, "output": e.response, "gts": e.ground_truth, "score": e.score}
            for e in evaluation.examples
        ]
        lines = "".join(json.dumps({**row, "step": step}) + "\n" for row in rows)
        self._keep(self._run_dir / "validation" / f"{step}.jsonl", lines)
        self._show(step, evaluation)

    def _show(self, step: int, evaluation: Evaluation) -> None:
        samples = [Generation(e.prompt, e.response, e.score) for e in evaluation.examples]
        shown = choose_generations(samples, self._shown_generations)
        for sink in self._sinks if shown else ():
            sink.write_generations(step, shown)

    def evaluation_failed(self, step: int, seconds: float) -> None:
        """Records that the version after `step` could not be validated."""
        self.step(step, {"val/failed": 1.0, "timing_s/testing": seconds})

    def accounts(self, accounts: Mapping[str, float]) -> None:
        """Records how the run's prompts and tokens ended."""
        text = json.dumps(dict(accounts), indent=2, sort_keys=True)
        self._keep(self._run_dir / "accounts.json", text + "\n")

    async def close(self) -> None:
        """Closes all sinks at once and beside the event loop; each gives up by its own limit."""
        async with asyncio.TaskGroup() as tasks:
            for sink in self._sinks:
                tasks.create_task(asyncio.to_thread(sink.close), name="closing a logger")

    def _keep(self, file: Path, text: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s is not written and the run goes on: %s", file, error)
            self._has_warned = True
