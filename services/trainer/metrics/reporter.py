"""Sends the run's numbers to all sinks and its examples to files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.trainer.metrics.generations import Generation, choose_generations
from services.trainer.metrics.sinks import MetricSink
from services.trainer.reward_client import Evaluation


class Reporter:
    """The run's record on disk.

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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def evaluation(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """Records validation numbers of the version after `step`, and its examples."""
        metrics = {**evaluation.metrics, "timing_s/testing": seconds, "val/failed": 0.0}
        metrics["val/generated_tokens"] = float(evaluation.generated_tokens)
        self.step(step, metrics)
        folder = self._run_dir / "validation"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"input": e.prompt, "output": e.response, "gts": e.ground_truth, "score": e.score}
            for e in evaluation.examples
        ]
        lines = "".join(json.dumps({**row, "step": step}) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(lines, encoding="utf-8")
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
        (self._run_dir / "accounts.json").write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            sink.close()
