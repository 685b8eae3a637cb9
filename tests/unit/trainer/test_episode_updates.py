"""Updates on batches with episodes: however they are cut, over ranks, and with rewards of turns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from services.trainer.learner.batch.train_batch import batch_table
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import update_flops
from services.trainer.loop.batch_check import BatchTerms, check_batch
from sluice.config.memory.shape import find_shape
from sluice.config.run import RunConfig
from sluice.errors import PeerError
from sluice.types import TrainBatch
from tests.support.episodes import (
    LINEAR,
    TREE,
    Shape,
    make_episode_batch,
    make_episodes,
    sequence_before,
)
from tests.support.taken_samples import outline_of, taken
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_group, save_model
from tests.unit.trainer.test_algorithms_on_ranks import ALGORITHMS, configured

CPU = torch.device("cpu")
TURN_REWARDS: dict[str, Any] = {"turn_rewards": True}
ON_RANKS = {name: ALGORITHMS[name] for name in ("critic", "sequence ratios", "whole groups")} | {
    "group relative": {},
    "turns": TURN_REWARDS,
    "turns with a critic": {**TURN_REWARDS, "algorithm": {"adv_estimator": "gae"}},
    "sequence weights": {"correction": {"rollout_is": "sequence"}},
    "rejected episodes": {
        "correction": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 20.0}
    },
    "baselines of turns": {"algorithm": {"adv_estimator": "tir_optimal_token_baseline"}},
    "mean of episodes": {"actor": {"loss_agg_mode": "seq-mean-token-mean"}},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def made(model_folder: Path, changes: dict[str, Any]) -> RunConfig:
    config = configured(model_folder, changes)
    trainer = structs.replace(
        config.sluice.trainer, turn_rewards=changes.get("turn_rewards", False)
    )
    return structs.replace(config, sluice=structs.replace(config.sluice, trainer=trainer))


def rewarded(batch: TrainBatch) -> TrainBatch:
    """The batch; each turn of an episode has a reward."""

    def turns(turns: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(turn, reward=0.25 * number) for number, turn in enumerate(turns))

    groups = tuple(
        replace(g, rollouts=tuple(replace(r, turns=turns(r.turns)) for r in g.rollouts))
        for g in batch.groups
    )
    return replace(batch, groups=groups)


def train(learner: Learner) -> tuple[dict[str, float], torch.Tensor]:
    """One step from the samples that the rank would read."""
    batch = rewarded(make_episode_batch())
    own = learner.own_rows(outline_of(batch), 1)
    metrics = learner.train_step(taken(batch, own), 1)
    return metrics, torch.cat([weight.flatten() for _, weight in learner.named_weights()])


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_with_their_own_episodes_train_like_one_with_all(
    model_folder: Path, name: str
) -> None:
    config = made(model_folder, ON_RANKS[name])

    def build(parallel: ParallelContext) -> Learner:
        return Learner(config, parallel, total_steps=10)

    expected, weights = train(build(ParallelContext()))
    (first, first_weights), (second, second_weights) = on_ranks(2, build, train)
    assert torch.equal(first_weights, second_weights)
    torch.testing.assert_close(first_weights, weights, atol=2e-5, rtol=1e-4)
    assert first["actor/pg_loss"] == second["actor/pg_loss"]
    assert first["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=2e-3, abs=2e-5)
    assert math.isfinite(expected["actor/grad_norm"])


@pytest.mark.parametrize("name", ["group relative", "sequence ratios", "critic"])
def test_the_cut_into_micro_batches_does_not_matter(model_folder: Path, name: str) -> None:
    config = made(model_folder, ON_RANKS[name])
    _, expected = train(Learner(config, ParallelContext(), total_steps=10))
    for budget in (24, 1000):
        actor = structs.replace(
            config.actor_rollout_ref.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=budget
        )
        policy = structs.replace(config.actor_rollout_ref, actor=actor)
        by_tokens = structs.replace(config, actor_rollout_ref=policy)
        _, found = train(Learner(by_tokens, ParallelContext(), total_steps=10))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_rewards_of_turns_change_nothing_unless_they_are_trained_on(model_folder: Path) -> None:
    config, found = made(model_folder, {}), []
    for batch in (make_episode_batch(), rewarded(make_episode_batch())):
        learner = Learner(config, ParallelContext(), total_steps=10)
        learner.train_step(batch, 1)
        found.append(torch.cat([weight.flatten() for _, weight in learner.named_weights()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_the_gradient_is_that_of_the_written_out_loss_of_turns(
    model_folder: Path, norm_by_std: bool
) -> None:
    """DAPO's first step: ratios are 1, so the gradient is that of -sum(A log p) / tokens."""
    batch = rewarded(make_episode_batch())
    actor = {"ppo_mini_batch_size": 6, "optim": {"lr": 1.0, "clip_grad": 1e9}}
    algorithm = {"norm_adv_by_std_in_grpo": norm_by_std}
    config = made(model_folder, {"actor": actor, "algorithm": algorithm} | TURN_REWARDS)
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").eval()
    loss, tokens = torch.zeros(()), 0
    for group in batch.groups:
        earned = [
            [scored.reward, *(turn.reward or 0.0 for turn in rollout.turns)]
            for rollout, scored in zip(group.rollouts, group.scores, strict=True)
        ]
        whole = np.array([sum(one) for one in earned])
        scale = whole.std(ddof=1) + 1e-6 if norm_by_std else 1.0
        for rollout, (score, *own) in zip(group.rollouts, earned, strict=True):
            for number, turn in enumerate(rollout.turns):
                if not turn.token_ids.size:
                    continue
                advantage = (score + sum(own[number:]) - whole.mean()) / scale
                before = sequence_before(group.prompt_token_ids, rollout.turns, number)
                read = np.concatenate([before, turn.token_ids]).astype(np.int64)
                row = torch.from_numpy(read)
                logits = model(input_ids=row[None], use_cache=False).logits[0, before.size - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, row[before.size :, None])
                loss = loss - float(advantage) * logprobs.sum()
                tokens += turn.token_ids.size
    parameters = [parameter for _, parameter in model.named_parameters()]
    gradients = torch.autograd.grad(loss / tokens, parameters)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    learner = Learner(config, ParallelContext(), total_steps=10)
    assert learner.train_step(batch, 1)["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_turns_reward_is_at_its_last_token() -> None:
    shapes = (
        Shape(0, 2, reward=1.0),
        Shape(1, 3, 0, reward=2.0),
        Shape(1, 0, 0, reward=4.0),
        Shape(1, 2, 0, reward=8.0),
    )
    first = (Shape(0, 0, reward=1.0), Shape(1, 2, 0, reward=2.0))
    batch = replace(make_batch(), groups=(make_episodes(1, (shapes, first, LINEAR)),))
    found = batch_table(batch, CPU).turn_rewards
    assert found is not None
    assert found[:, :7].tolist() == [
        [0.0, 1.0, 0.0, 0.0, 6.0, 0.0, 8.0],
        [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0] * 7,
    ]
    assert batch_table(make_batch(), CPU).turn_rewards is None


def test_operations_count_what_episodes_read(tmp_path: Path) -> None:
    shape = find_shape(str(save_model(tmp_path)))
    assert shape is not None
    group = make_group(1)
    prompt = int(group.prompt_token_ids.size)
    rollout = make_episodes(1, (TREE, TREE)).rollouts[0]
    batch = replace(make_batch(1), groups=(replace(group, rollouts=(rollout,)),))
    # The prompt and three paths that follow it, and one that does not.
    lengths, alone = (2 + 4 + 4, 2 + 4 + 4, 2 + 3), 8
    seen = sum(n * prompt + n * (n + 1) / 2 for n in lengths)
    seen += prompt * (prompt + 1) / 2 + alone * (alone + 1) / 2
    expected = shape.training_flops(prompt + sum(lengths) + alone, rollout.num_tokens, seen)
    assert update_flops(shape, batch, ()) == pytest.approx(expected)


def test_a_batch_reports_turns_roots_and_the_tokens_read(model_folder: Path) -> None:
    batch = make_episode_batch()
    metrics = Learner(made(model_folder, {}), ParallelContext(), 10).train_step(batch, 1)
    rollouts = [one for group in batch.groups for one in group.rollouts]
    read = sum(one.num_context_tokens for one in rollouts)
    prompts = sum(group.prompt_token_ids.size * 4 for group in batch.groups)
    assert metrics["episodes/tokens_read"] == read
    assert metrics["episodes/tokens_sampled"] == sum(one.num_tokens for one in rollouts)
    assert metrics["perf/total_num_tokens"] == prompts + read + metrics["episodes/tokens_sampled"]
    assert metrics["num_turns/max"] == 12
    assert metrics["episodes/roots/mean"] == pytest.approx((24 + 6) / 24)


def test_episodes_are_within_the_terms_but_new_roots_beside_images_are_not() -> None:
    batch = outline_of(make_episode_batch())
    check_batch(batch, BatchTerms(6, 4, max_staleness=0), 1)
    groups = list(batch.groups)
    groups[2] = replace(groups[2], images=(b"",))
    with pytest.raises(PeerError, match="sample 1: a turn begins without the prompt"):
        check_batch(replace(batch, groups=tuple(groups)), BatchTerms(6, 4, max_staleness=0), 1)
