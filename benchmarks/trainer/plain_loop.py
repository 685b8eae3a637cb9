"""The learner's tokens/s against a plain loop over transformers' modules, the same job.

Rows of unequal lengths, eight responses to a prompt; DAPO's loss (https://arxiv.org/abs/2503.14476)
in two optimizer steps a batch, AdamW, float32, one thread. The loop pads rows on the right, so that
causal attention needs no mask; the learner's token budget is that of as many rows of the greatest
length as the loop takes at once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.reporting import alternate, print_line
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from sluice.config.run import RunConfig
from sluice.types import DataProgress, TrainBatch, TrainGroup
from tests.support.tiny_policy import make_group, save_model

_GROUPS, _SAMPLES, _STEPS = 8, 8, 2
_PROMPT, _LONGEST, _MICRO_ROWS = 64, 384, 8
_REPEATS, _LEARNING_RATE = 3, 1e-4
_LOW, _HIGH, _DUAL = 0.2, 0.28, 3.0
_MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}


def learner_against_loop() -> dict[str, Any]:
    """Return the ratio, the median of neighbouring runs; check that both have the same losses."""
    torch.set_num_threads(1)
    batch = _batch()
    tokens = sum(r.num_tokens + g.prompt_token_ids.size for g in batch.groups for r in g.rollouts)
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name), "qwen3", **_MODEL)
        learner = Learner(_config(folder), ParallelContext(), total_steps=100)
        loop = PlainLoop(folder)
        first, theirs = learner.train_step(batch, 1), loop.train(batch)
    ours = first["actor/pg_loss"]
    if abs(ours - theirs) > 1e-4:
        raise SystemExit(f"the jobs differ: loss {ours:g} of the learner, {theirs:g} of the loop")
    seconds = alternate(
        {
            "learner": lambda: _seconds(lambda: learner.train_step(batch, 2)),
            "loop": lambda: _seconds(lambda: loop.train(batch)),
        },
        _REPEATS,
    )
    pairs = zip(seconds["loop"], seconds["learner"], strict=True)
    print_line(
        f"{tokens} tokens: learner {tokens / median(seconds['learner']):.0f} tokens/s, "
        f"plain loop {tokens / median(seconds['loop']):.0f}"
    )
    return {"learner_vs_hf": round(median(theirs / ours for theirs, ours in pairs), 2)}


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A micro-batch, padded on the right: tokens [rows, width]; only responses count."""

    token_ids: Tensor
    is_response: Tensor  # bool [rows, width - 1], of predicted tokens
    advantages: Tensor  # [rows, 1]


class PlainLoop:
    """Transformers' modules of a folder, padded rows, all logits of a micro-batch at once."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01
        )

    def train(self, batch: TrainBatch) -> float:
        """Make one batch's optimizer steps; return their mean loss."""
        size = len(batch.groups) // _STEPS
        steps = [
            self._micro_batches(batch.groups[start : start + size])
            for start in range(0, len(batch.groups), size)
        ]
        with torch.no_grad():
            old = [[self._logprobs(rows) for rows in step] for step in steps]
        losses = [self._step(*pair) for pair in zip(steps, old, strict=True)]
        return sum(losses) / len(losses)

    def _step(self, step: Sequence[_Rows], old: Sequence[Tensor]) -> float:
        self._optimizer.zero_grad()
        tokens, total = sum(int(rows.is_response.sum()) for rows in step), 0.0
        for rows, before in zip(step, old, strict=True):
            ratio = (self._logprobs(rows) - before).exp()
            unclipped = -rows.advantages * ratio
            clipped = -rows.advantages * ratio.clamp(1 - _LOW, 1 + _HIGH)
            each = torch.maximum(unclipped, clipped)
            dual = torch.minimum(each, -rows.advantages * _DUAL)
            each = torch.where(rows.advantages < 0, dual, each)
            loss = (each * rows.is_response).sum() / tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return total

    def _logprobs(self, rows: _Rows) -> Tensor:
        logits = self._model(input_ids=rows.token_ids, use_cache=False).logits[:, :-1]
        found = logits.log_softmax(-1).gather(-1, rows.token_ids[:, 1:, None])
        return cast("Tensor", found[..., 0])

    def _micro_batches(self, groups: Sequence[TrainGroup]) -> list[_Rows]:
        rows = [
            (group.prompt_token_ids, rollout.token_ids, advantage)
            for group in groups
            for rollout, advantage in zip(group.rollouts, _advantages(group), strict=True)
        ]
        return [
            _padded(rows[start : start + _MICRO_ROWS]) for start in range(0, len(rows), _MICRO_ROWS)
        ]


def _advantages(group: TrainGroup) -> list[float]:
    """Return rewards normalized in their group, as GRPO does."""
    rewards = torch.tensor([scored.reward for scored in group.scores])
    found: list[float] = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    return found


def _padded(rows: Sequence[tuple[Any, Any, float]]) -> _Rows:
    width = max(prompt.size + response.size for prompt, response, _ in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    is_response = torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for row, (prompt, response, _) in enumerate(rows):
        end = prompt.size + response.size
        token_ids[row, :end] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        is_response[row, prompt.size - 1 : end - 1] = True
    return _Rows(token_ids, is_response, torch.tensor([[one] for *_, one in rows]))


def _batch() -> TrainBatch:
    random = np.random.default_rng(0)
    groups = []
    for seed in range(_GROUPS):
        lengths = random.lognormal(np.log(96), 0.7, _SAMPLES).clip(8, _LONGEST).astype(int)
        group = make_group(seed, tuple(lengths.tolist()))
        prompt = random.integers(_MODEL["vocab_size"], size=random.integers(16, _PROMPT + 1))
        groups.append(replace(group, prompt_token_ids=prompt.astype(np.uint32)))
    return TrainBatch("batch", 1, tuple(groups), DataProgress(_GROUPS), {})


def _config(folder: Path) -> RunConfig:
    tree = {
        "data": {
            "train_batch_size": _GROUPS,
            "max_prompt_length": _PROMPT,
            "max_response_length": _LONGEST,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "actor": {
                "ppo_mini_batch_size": _GROUPS // _STEPS,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": _MICRO_ROWS * (_PROMPT + _LONGEST),
                "clip_ratio_low": _LOW,
                "clip_ratio_high": _HIGH,
                "clip_ratio_c": _DUAL,
                "optim": {"lr": _LEARNING_RATE},
                "fsdp_config": {"dtype": "float32"},
            },
        },
        "trainer": {"device": "cpu"},
    }
    return msgspec.convert(tree, RunConfig)


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()  # of one thread, which never waits: other load counts little
    work()
    return time.process_time() - began_s
