"""The trainer's table of estimators and losses by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.reference import ReferencePolicy
from services.trainer.loop.batch_check import BatchTerms, check_batch
from sluice.config.run import RunConfig
from sluice.errors import PeerError
from sluice.types import TrainBatch
from tests.support import tiny_policy
from tests.support.metric_rows import without_row
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config, save_model, uniform, with_sources

MATH, CODE = (0, 2, 3, 5), (1, 4)  # groups of a batch: each mini-batch of three has both
of_sources = partial(tiny_policy.of_sources, names=("math", "code", "math"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def configured(model_folder: Path, **sources: dict[str, object]) -> RunConfig:
    """A run whose sources have these settings."""
    return with_sources(make_config(model_folder), sources)


def trained(
    config: RunConfig, batches: Sequence[TrainBatch]
) -> tuple[torch.Tensor, dict[str, float]]:
    return worked(Learner(config, ParallelContext(), total_steps=10), batches)


def worked(
    learner: Learner, batches: Sequence[TrainBatch]
) -> tuple[torch.Tensor, dict[str, float]]:
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = learner.train_step(batch, step)
    return torch.cat([weight.flatten() for _, weight in learner.named_weights()]), metrics


def test_sources_with_equal_settings_train_as_one(model_folder: Path) -> None:
    batches = [make_batch(seed=seed) for seed in (0, 1)]
    expected, metrics = trained(configured(model_folder), batches)
    found, of_both = trained(
        configured(model_folder, math={}, code={}), [of_sources(batch) for batch in batches]
    )
    torch.testing.assert_close(found, expected)
    for name in ("actor/pg_loss", "actor/pg_clipfrac", "critic/advantages/mean", "actor/entropy"):
        assert of_both[name] == pytest.approx(metrics[name], abs=1e-6)
    parts = sum(of_both[f"sources/{name}/actor/pg_loss"] for name in ("math", "code"))
    assert parts == pytest.approx(of_both["actor/pg_loss"], abs=1e-6)
    assert without_row(set(of_both)) == []


@pytest.mark.parametrize(("silent", "loss"), [(CODE, "gspo"), (MATH, "gpg")])
def test_each_source_trains_with_its_loss(
    model_folder: Path, silent: tuple[int, ...], loss: str
) -> None:
    """Where one source has no advantages, the other trains as a run with its loss alone."""
    batch = uniform(make_batch(), silent)
    alone = configured(model_folder)
    actor = alone.actor_rollout_ref.actor
    actor = structs.replace(actor, policy_loss=structs.replace(actor.policy_loss, loss_mode=loss))
    alone = structs.replace(
        alone, actor_rollout_ref=structs.replace(alone.actor_rollout_ref, actor=actor)
    )
    expected, _ = trained(alone, [batch])
    both = configured(model_folder, math={"loss_mode": "gspo"}, code={"loss_mode": "gpg"})
    found, _ = trained(both, [of_sources(batch)])
    torch.testing.assert_close(found, expected)


def test_each_source_has_its_estimator_over_its_rows_alone(model_folder: Path) -> None:
    run = configured(
        model_folder, math={"adv_estimator": "reinforce_plus_plus"}, code={"adv_estimator": "rloo"}
    )
    batch = of_sources(make_batch())
    _, metrics = trained(run, [batch])
    # Whitened over the rows of math alone; of code a row is compared with the others of its group.
    assert metrics["sources/math/critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    best = []
    for number in CODE:
        rewards = [scored.reward for scored in batch.groups[number].scores]
        best.append(max(r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards))
    assert metrics["sources/code/critic/advantages/max"] == pytest.approx(max(best))


def test_each_source_has_its_divergence_from_the_reference(model_folder: Path) -> None:
    run = configured(model_folder, math={}, code={"use_kl_loss": True, "kl_loss_coef": 0.5})
    _, metrics = trained(run, [of_sources(make_batch(seed=seed)) for seed in (0, 1)])
    assert metrics["sources/code/actor/kl_coef"] == 0.5
    assert metrics["sources/code/actor/kl_loss"] > 0.0
    assert "sources/math/actor/kl_loss" not in metrics


def test_only_rows_with_a_divergence_pass_the_reference(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, real = set[str](), ReferencePolicy.logprobs

    def noting(
        reference: ReferencePolicy, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[torch.Tensor]:
        passed.update(one.source for one in micro_batches)
        return real(reference, micro_batches, temperature)

    monkeypatch.setattr(ReferencePolicy, "logprobs", noting)
    run = configured(model_folder, math={}, code={"use_kl_loss": True})
    trained(run, [of_sources(make_batch())])
    assert passed == {"code"}


class Noting(ParallelContext):
    """A lone rank that notes what it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def gather_rows(self, values: Sequence[float], phase: str) -> list[list[float]]:
        self.phases.append(phase)
        return super().gather_rows(values, phase)


def test_the_metrics_of_all_sources_cost_one_exchange(model_folder: Path) -> None:
    rank = Noting()
    learner = Learner(configured(model_folder, math={}, code={}), rank, total_steps=10)
    worked(learner, [of_sources(make_batch())])
    assert rank.phases.count("summing the update's metrics") == 1


def test_ranks_train_sources_like_one(model_folder: Path) -> None:
    settings = {"math": {"loss_mode": "gspo"}, "code": {"adv_estimator": "rloo"}}
    config, batches = configured(model_folder, **settings), [of_sources(make_batch())]  # type: ignore[arg-type]
    expected, metrics = trained(config, batches)

    def build(parallel: ParallelContext) -> Learner:
        return Learner(config, parallel, total_steps=10)

    for found, of_rank in on_ranks(2, build, lambda learner: worked(learner, batches)):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        name = "sources/code/actor/pg_loss"
        assert of_rank[name] == pytest.approx(metrics[name], abs=1e-6)


def test_a_batch_with_a_group_of_an_unknown_source_is_refused() -> None:
    own = BatchTerms(6, 4, max_staleness=0)
    terms = replace(own, sources={"math": own})
    with pytest.raises(PeerError, match=r"source 'code', which sluice\.sources does not have"):
        check_batch(of_sources(make_batch()), terms, 1)


def test_a_group_has_at_most_the_samples_of_its_source() -> None:
    terms = BatchTerms(6, 4, max_staleness=0)
    small = replace(terms, samples_per_group=2)
    with pytest.raises(PeerError, match=r"group prompt-1: 4 samples, expected 2\.\.2"):
        check_batch(
            of_sources(make_batch()), replace(terms, sources={"math": terms, "code": small}), 1
        )
