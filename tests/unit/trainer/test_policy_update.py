"""One update: its cut does not matter, and old logprobs are those of the policy before it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import passes
from services.trainer.learner.model.forward import EntropyUse, TokenPass, token_outputs
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.types import Rollout, TrainBatch
from tests.support.domain_values import with_turn
from tests.support.group_advantages import grpo_advantages
from tests.support.tiny_policy import make_batch, make_config, make_group, recomputing, save_model

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_learner(config: RunConfig) -> Learner:
    return Learner(config, ParallelContext(), total_steps=10)


def train(config: RunConfig, *batches: TrainBatch) -> tuple[Weights, dict[str, float]]:
    learner = make_learner(config)
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = learner.train_step(batch, step)
    return {name: weight.clone() for name, weight in learner.named_weights()}, metrics


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4, msg=name)


class Forwards:
    """Counts of forward passes with and without gradients, and their results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.differentiated: list[torch.Tensor] = []
        self.recomputed: list[torch.Tensor] = []
        self.entropies: list[EntropyUse] = []
        monkeypatch.setattr(passes, "token_outputs", self._record)

    def _record(
        self, model: PreTrainedModel, one: TokenPass, entering: torch.Tensor | None
    ) -> TokenStatistics:
        outputs = token_outputs(model, one, entering)
        kept = self.differentiated if torch.is_grad_enabled() else self.recomputed
        kept.append(outputs.logprobs.detach())
        self.entropies.append(one.entropy)
        return outputs


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_the_size_of_micro_batches_changes_neither_loss_nor_weights(
    model_folder: Path, mode: str
) -> None:
    cuts: list[dict[str, object]] = [
        {"ppo_micro_batch_size_per_gpu": 12},
        {"ppo_micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 60},
    ]
    (whole, expected), *others = [
        train(
            make_config(model_folder, loss_agg_mode=mode, entropy_coeff=0.01, **cut), make_batch()
        )
        for cut in cuts
    ]
    for weights, metrics in others:
        assert_close(weights, whole)
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_gradient_checkpointing_changes_nothing_but_memory(model_folder: Path) -> None:
    config = make_config(model_folder)
    assert_close(train(recomputing(config), make_batch())[0], train(config, make_batch())[0])


def test_padding_to_a_length_changes_nothing_but_the_number_of_tokens(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    padded = {"dtype": "float32", "pad_to_length": True, "pad_to_length_bucket": 64}
    expected = train(make_config(model_folder), make_batch())[0]

    def note(
        model: PreTrainedModel, one: TokenPass, entering: torch.Tensor | None
    ) -> TokenStatistics:
        lengths.append(one.micro_batch.input_ids.shape[1])
        return token_outputs(model, one, entering)

    monkeypatch.setattr(passes, "token_outputs", note)
    assert_close(train(make_config(model_folder, fsdp_config=padded), make_batch())[0], expected)
    assert set(lengths) <= {64, 128, 192}


def test_dropout_of_the_model_stays_off(tmp_path: Path, model_folder: Path) -> None:
    config = recomputing(make_config(save_model(tmp_path, attention_dropout=0.5)))
    expected = train(make_config(model_folder), make_batch())[0]
    assert_close(train(config, make_batch())[0], expected)


def test_the_gradient_is_that_of_the_written_out_loss(model_folder: Path) -> None:
    """DAPO's first step: ratios are 1, so the gradient is that of -sum(A log p) / tokens."""
    batch = make_batch()
    config = make_config(model_folder, ppo_mini_batch_size=6, optim={"lr": 1.0, "clip_grad": 1e9})
    learner = make_learner(config)
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").eval()
    loss, tokens = torch.zeros(()), 0
    for group in batch.groups:
        rewards = np.array([scored.reward for scored in group.scores])
        advantages = grpo_advantages(rewards, norm_by_std=True)
        prompt = group.prompt_token_ids.astype(np.int64)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            row = torch.from_numpy(np.concatenate([prompt, rollout.token_ids.astype(np.int64)]))
            logits = model(input_ids=row[None], use_cache=False).logits[0, prompt.size - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, row[prompt.size :, None])
            loss = loss - float(advantage) * logprobs.sum()
            tokens += rollout.num_tokens
    parameters = [parameter for _, parameter in model.named_parameters()]
    gradients = torch.autograd.grad(loss / tokens, parameters)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert learner.train_step(batch, 1)["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_there_are_as_many_optimizer_steps_as_mini_batches_and_epochs(model_folder: Path) -> None:
    learner = make_learner(make_config(model_folder, ppo_mini_batch_size=2, ppo_epochs=2))
    learner.train_step(make_batch(), 1)
    steps = {float(s) for n, s in learner._optimizer.state_tensors().items() if "step" in n}
    assert steps == {6.0}


def test_a_single_mini_batch_needs_no_forward_pass_for_old_logprobs(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Forwards(monkeypatch)
    config = make_config(model_folder, ppo_mini_batch_size=6, ppo_micro_batch_size_per_gpu=24)
    _, metrics = train(config, make_batch())
    assert (len(seen.recomputed), len(seen.differentiated)) == (0, 1)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["training/rollout_probs_diff_valid"] == 1.0


def test_old_logprobs_are_of_the_policy_before_the_first_step(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Forwards(monkeypatch)
    whole = {"ppo_micro_batch_size_per_gpu": 24}
    _, metrics = train(make_config(model_folder, ppo_mini_batch_size=3, **whole), make_batch())
    # The first mini-batch's come from its own pass; the second's from one before any step.
    (recomputed,), (first, second) = seen.recomputed, seen.differentiated
    assert not torch.equal(recomputed, second)
    kl = float((recomputed - second).sum()) / (first.numel() + second.numel())
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, rel=1e-4)
    assert seen.entropies == [EntropyUse.METRIC, EntropyUse.METRIC, EntropyUse.NONE]


def test_rollout_logprobs_as_old_ones_save_all_recomputation(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Forwards(monkeypatch)
    config = make_config(model_folder, use_rollout_log_probs=True, ppo_micro_batch_size_per_gpu=24)
    batch = make_batch()
    _, metrics = train(config, batch)
    assert seen.recomputed == []
    behavior = np.concatenate([r.behavior_logprobs for g in batch.groups for r in g.rollouts])
    found = torch.cat(seen.differentiated).numpy()
    assert metrics["actor/ppo_kl"] == pytest.approx(float((behavior - found).mean()), rel=1e-4)


def test_importance_weights_are_those_of_old_against_behaviour(model_folder: Path) -> None:
    """With behavior logprobs far below the trainer's, every weight is the threshold."""
    config = make_config(model_folder, ppo_mini_batch_size=6)
    correction = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    weighted = structs.replace(
        config,
        algorithm=structs.replace(
            config.algorithm,
            rollout_correction=structs.replace(config.algorithm.rollout_correction, **correction),
        ),
    )
    batch = _with_behavior(make_batch(), -60.0)
    plain, scaled = train(config, batch)[1], train(weighted, batch)[1]
    assert scaled["actor/pg_loss"] == pytest.approx(1.5 * plain["actor/pg_loss"], rel=1e-4)
    assert scaled["actor/grad_norm"] == pytest.approx(1.5 * plain["actor/grad_norm"], rel=1e-4)


def test_a_non_finite_gradient_changes_no_weight_and_is_counted(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(make_config(model_folder, ppo_mini_batch_size=6))
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    learner._optimizer.gradients.buffers[0][3] = math.inf
    metrics = learner.train_step(make_batch(), 1)
    assert metrics["actor/skipped_updates"] == 1.0
    assert "actor/grad_norm" not in metrics
    assert all(torch.equal(weight, before[name]) for name, weight in learner.named_weights())
    assert "optimizer step skipped: gradient norm is inf" in caplog.text
    assert learner.train_step(make_batch(), 2)["actor/skipped_updates"] == 0.0


def test_empty_responses_train_nothing_but_count_as_rows(model_folder: Path) -> None:
    groups = tuple(make_group(seed, (0, 4, 0, 5)) for seed in range(6))
    batch = replace(make_batch(), groups=groups)
    _, metrics = train(make_config(model_folder, loss_agg_mode="seq-mean-token-mean"), batch)
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["response/aborted_ratio"] == 0.5


def test_the_schedule_counts_train_batches_from_the_first(model_folder: Path) -> None:
    learner = make_learner(make_config(model_folder, optim={"lr": 0.5, "lr_warmup_steps": 4}))
    rates = [learner.train_step(make_batch(), step)["actor/lr"] for step in (1, 2, 3)]
    assert rates == [0.0, 0.125, 0.25]


def test_shuffling_regroups_mini_batches_the_same_way_each_time(model_folder: Path) -> None:
    config = make_config(model_folder, shuffle=True)
    (first, _), (second, _), (straight, _) = (
        train(each, make_batch()) for each in (config, config, make_config(model_folder))
    )
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, straight[name]) for name, weight in first.items())


def test_bfloat16_weights_train(model_folder: Path) -> None:
    precision = {"model_dtype": "bfloat16", "dtype": "bfloat16"}
    weights, metrics = train(make_config(model_folder, fsdp_config=precision), make_batch())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert math.isfinite(metrics["actor/grad_norm"])


def test_bfloat16_passes_over_float32_weights_train(model_folder: Path) -> None:
    weights, metrics = train(make_config(model_folder, fsdp_config={}), make_batch())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    reference = train(make_config(model_folder), make_batch())[1]
    assert metrics["actor/grad_norm"] == pytest.approx(reference["actor/grad_norm"], rel=0.2)


def test_micro_batches_of_unknown_size_are_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="ppo_micro_batch_size_per_gpu is not set; give the rows"):
        make_learner(make_config(model_folder, ppo_micro_batch_size_per_gpu=None))


def _with_behavior(batch: TrainBatch, logprob: float) -> TrainBatch:
    def changed(rollout: Rollout) -> Rollout:
        logprobs = np.full(rollout.num_tokens, logprob, np.float32)
        return with_turn(rollout, behavior_logprobs=logprobs)

    return replace(
        batch,
        groups=tuple(
            replace(group, rollouts=tuple(changed(rollout) for rollout in group.rollouts))
            for group in batch.groups
        ),
    )
