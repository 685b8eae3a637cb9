"""The job that sluice and TRL train, its reward, and the held-out accuracy of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from services.reward.grading.scorers.math_dapo import compute_score
from sluice.algorithm.overlong import OverlongShaping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class DapoJob:
    """The quickstart's DAPO job; sizes in groups, completions, tokens or optimizer steps."""

    group_size: int = 8
    batch_groups: int = 64
    steps_per_batch: int = 2
    max_response_tokens: int = 56
    overlong_buffer_tokens: int = 8
    learning_rate: float = 1e-3
    # The learning rate decays linearly to this share of it, over so many batches.
    min_lr_ratio: float = 0.5
    schedule_batches: int = 20
    adam_betas: tuple[float, float] = (0.9, 0.95)
    clip_low: float = 0.2
    clip_high: float = 0.28
    samples_per_held_out: int = 2

    @property
    def batch_completions(self) -> int:
        """Completions that one generation makes."""
        return self.batch_groups * self.group_size


JOB = DapoJob()


def dapo_reward(
    *,
    completions: list[str],
    completion_ids: list[list[int]],
    ground_truth: list[str],
    **_: object,
) -> list[float]:
    """Return score plus overlong penalty of each completion, as TRL calls for them.

    The ids include the stop token, the texts do not.
    """
    shaping = OverlongShaping(JOB.max_response_tokens, JOB.overlong_buffer_tokens, 1.0)
    return [
        compute_score(text, truth)["score"] + shaping.penalty(len(ids))
        for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
    ]


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's `value`; all ranks must call it."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return prompts with the chat template applied (once, not in every batch), and the truths."""
    template: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    return [
        {
            "prompt": str(tokenizer.apply_chat_template(row["prompt"], **template)),
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in pq.read_table(path, columns=["prompt", "reward_model"]).to_pylist()
    ]


class HeldOut:
    """Accuracy on the held-out problems at the job's temperature; ranks share the problems.

    Args:
        rows: every problem's `prompt` (text) and `ground_truth`.
        tokenizer: of the model.
    """

    def __init__(self, rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> None:
        rank, size = rank_and_size()
        self._num_samples = len(rows) * JOB.samples_per_held_out
        self._rows, self._tokenizer = rows[rank::size], tokenizer
        self._inputs = tokenizer(
            [row["prompt"] for row in self._rows],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )

    def accuracy(self, model: Any, seed: int) -> float:  # noqa: ANN401 - typed without generate
        """Return the share of right answers over all ranks; leave global random numbers alone."""
        rank, size = rank_and_size()
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed * size + rank)
            tokens = model.generate(
                **self._inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=JOB.max_response_tokens,
                num_return_sequences=JOB.samples_per_held_out,
            )
        model.train(was_training)
        responses = tokens[:, self._inputs["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        truths = [
            row["ground_truth"] for row in self._rows for _ in range(JOB.samples_per_held_out)
        ]
        right = sum(compute_score(text, t)["acc"] for text, t in zip(texts, truths, strict=True))
        return sum_over_ranks(right) / self._num_samples
