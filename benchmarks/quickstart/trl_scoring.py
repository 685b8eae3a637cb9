"""The reward function that TRL calls: the quickstart's scorer and overlong shaping."""

from __future__ import annotations

from benchmarks.quickstart.trl_settings import DapoJob
from services.reward.grading.scorers.math_dapo import compute_score
from sluice.algorithm.overlong import overlong_penalty


class DapoReward:
    """Score plus overlong penalty of each completion; counts the tokens it gets."""

    __name__ = "math_dapo"  # TRL names its metric after the function

    def __init__(self, job: DapoJob) -> None:
        self._job = job
        self.num_tokens = 0

    def __call__(
        self,
        *,
        completions: list[str],
        completion_ids: list[list[int]],
        ground_truth: list[str],
        **_: object,
    ) -> list[float]:
        """Return rewards of the completions; ids include the stop token, texts do not."""
        self.num_tokens += sum(map(len, completion_ids))
        return [
            compute_score(text, truth)["score"] + self._penalty(len(ids))
            for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
        ]

    def _penalty(self, num_tokens: int) -> float:
        return overlong_penalty(
            num_tokens,
            max_response_tokens=self._job.max_response_tokens,
            buffer_tokens=self._job.overlong_buffer_tokens,
            penalty_factor=self._job.overlong_penalty_factor,
        )
