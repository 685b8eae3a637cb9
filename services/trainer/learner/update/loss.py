"""The configured policy loss of one micro-batch, and the sums of what a train batch reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from types import MappingProxyType

import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.batch.train_batch import MiniBatch
from services.trainer.learner.model.experts import Routing
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.settings import UpdateSettings
from sluice.algorithm.kl import kl_estimate
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean
from sluice.algorithm.losses.objective import PolicyObjective, TotalLoss, total_loss
from sluice.algorithm.registry import policy_objective
from sluice.algorithm.rollout_correction.correction import RolloutCorrection, rollout_correction
from sluice.algorithm.rollout_correction.settings import BYPASS_LOSS_MODE
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    ProbsDiffSums,
    Statistics,
    merge_statistics,
    metrics_of,
    statistics_from_vector,
    statistics_to_vector,
)
from sluice.algorithm.sources import source_metric
from sluice.algorithm.token_statistics import TokenStatistics

LOSSES = ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "actor/loss")
ENTROPY = "actor/entropy"


@dataclass(slots=True, eq=False)
class PreparedMicroBatch:
    """A micro-batch and the inputs of its loss, [N] each: one value per response token.

    `old_logprobs` are ``None`` until a pass of the policy before this batch yields them. `weights`
    and `kept` stay ``None`` without importance weights and without rejections. `routing` is that of
    the first pass; later passes follow it. ``None``: each pass chooses its experts.
    """

    micro_batch: MicroBatch
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None
    routing: Routing | None = None

    def loss_inputs(self, logprobs: Tensor, *, seed: int) -> LossInputs:
        """Return the policy loss's inputs, with rejected tokens; old logprobs must be known."""
        assert self.old_logprobs is not None
        micro_batch = self.micro_batch
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            row_index=micro_batch.rows,
            num_rows=micro_batch.num_rows,
            rollout_weights=self.weights,
            rollout_logprobs=micro_batch.behavior_logprobs,
            row_groups=micro_batch.row_groups,
            row_advantages=first_of_rows(self.advantages, micro_batch),
            seed=seed,
        )


@dataclass(slots=True, eq=False)
class PreparedMiniBatch:
    """This rank's part of one optimizer step, and the step's counts over all ranks.

    `is_routed`: passes have noted their routing, on all ranks, for later ones to follow.
    """

    micro_batches: tuple[PreparedMicroBatch, ...]
    counts: GlobalCounts
    is_routed: bool = False


def prepare(mini_batch: MiniBatch) -> PreparedMiniBatch:
    """Return the mini-batch before any pass, with advantages 0."""
    return PreparedMiniBatch(
        tuple(
            PreparedMicroBatch(micro_batch, torch.zeros_like(micro_batch.behavior_logprobs))
            for micro_batch in mini_batch.micro_batches
        ),
        mini_batch.counts,
    )


def first_of_rows(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the value of each row's first trained token, [R]; 0 for a row without any."""
    rows = micro_batch.rows
    is_first = torch.cat([torch.ones_like(rows[:1]), rows[1:] - rows[:-1]]) > 0
    # Not values[is_first]: the host would have to know how many there are.
    firsts = torch.where(is_first, values, 0.0)
    return values.new_zeros(micro_batch.num_rows).index_add_(0, micro_batch.rows, firsts)


class LossTerms:
    """The configured loss, corrections included."""

    def __init__(self, settings: UpdateSettings) -> None:
        self._settings = settings
        self._actor = settings.actor
        self._objective = policy_objective(settings.loss_mode)

    def loss(
        self,
        outputs: TokenStatistics,
        prepared: PreparedMicroBatch,
        counts: GlobalCounts,
        *,
        seed: int,
    ) -> tuple[TotalLoss, PolicyObjective]:
        """Return this micro-batch's share of the mini-batch's loss, and the policy's part.

        Rejected tokens are left out, but the denominators still come from `counts`.
        """
        inputs = prepared.loss_inputs(outputs.logprobs, seed=seed)
        kept = prepared.kept
        if kept is not None:
            inputs = inputs.select_tokens(kept)
        objective = self._objective(inputs, counts, self._settings.loss)
        kl, entropy = None, _select(outputs.entropy, kept)
        if self._actor.use_kl_loss:
            assert prepared.ref_logprobs is not None
            reference = _select(prepared.ref_logprobs, kept)
            assert reference is not None
            kl = kl_estimate(inputs.logprobs, reference, kind=self._actor.kl_loss_type)
        shows_entropy = self._actor.entropy_coeff != 0.0 or self._actor.calculate_entropy
        total = total_loss(
            objective,
            inputs,
            counts,
            self._settings.loss,
            entropy=entropy if shows_entropy else None,
            entropy_coeff=self._actor.entropy_coeff,
            kl=kl,
            kl_loss_coef=self._actor.kl_loss_coef,
        )
        return total, objective

    def correct(self, prepared: PreparedMicroBatch) -> Callable[[], Statistics] | None:
        """Set weights and rejections from old and behavior logprobs; return what reads statistics.

        ``None``: the two logprobs are equal, or the loss itself corrects.
        """
        settings = self._settings
        if settings.old_is_behavior:
            return None
        assert prepared.old_logprobs is not None
        find = partial(
            rollout_correction,
            prepared.old_logprobs,
            prepared.micro_batch.behavior_logprobs,
            prepared.micro_batch.rows,
            settings.correction,
        )
        if settings.correction.rollout_is is None and settings.correction.rollout_rs is None:
            return lambda: find().statistics
        correction = find()
        prepared.weights = correction.weights
        prepared.kept = correction.kept if settings.correction.rollout_rs is not None else None
        return lambda: correction.statistics

    def mean_names(self) -> tuple[str, ...]:
        """Return the names of the means that the loss reports, by a trial on made-up tokens."""
        # One whole group of samples, since some losses compare all samples of a group.
        samples = self._settings.loss.adpo.num_generations
        tokens = torch.zeros(2 * samples)
        inputs = LossInputs(
            logprobs=tokens,
            old_logprobs=tokens,
            advantages=tokens,
            row_index=torch.arange(samples).repeat_interleave(2),
            num_rows=samples,
            rollout_logprobs=tokens,
            row_groups=(0,) * samples,
            row_advantages=torch.zeros(samples),
        )
        counts = GlobalCounts(tokens=2 * samples, rows=samples, groups=1)
        return tuple(self._objective(inputs, counts, self._settings.loss).metrics)

    def no_corrections(self) -> Statistics:
        """Return the statistics of `correct`, or of a loss that corrects, for no tokens."""
        if self._settings.old_is_behavior and self._settings.loss_mode != BYPASS_LOSS_MODE:
            return {}
        correction: RolloutCorrection = rollout_correction(
            torch.zeros(2), torch.zeros(2), torch.tensor([0, 1]), self._settings.correction
        )
        return {name: replace(s, moments=Moments()) for name, s in correction.statistics.items()}


def _select(values: Tensor | None, is_kept: Tensor | None) -> Tensor | None:
    return values if values is None or is_kept is None else values[is_kept]


class UpdateSums:
    """Sums of one train batch on this rank; `metrics` adds the metrics of all ranks.

    Nothing is read between a mini-batch's passes, which would wait for the accelerator's queue.

    Args:
        means: names of the means that the policy loss reports. They are known before the first
            loss, so that all ranks gather equally long vectors, even a rank without rows.
        corrections: empty statistics with the names that rollout correction reports.
        sources: means of the loss of each of several sources, by its name. They get sums of their
            own, of losses and entropy.
    """

    def __init__(
        self,
        means: Sequence[str],
        corrections: Statistics,
        sources: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._of_sources = {name: UpdateSums(names, {}) for name, names in sources.items()}
        self._names = tuple(sorted(means))
        self._sums = dict.fromkeys((*self._names, *LOSSES), 0.0)
        self._counts = dict.fromkeys(self._names, 0.0)
        self._with_entropy = False
        self._with_kl = False
        self._entropy_sum = 0.0
        self._entropy_tokens = 0
        self._probs_diff = ProbsDiffSums()
        self._corrections = corrections
        self._unread: list[Callable[[], None]] = []

    def add_loss(self, total: TotalLoss, means: Mapping[str, MetricMean], source: str = "") -> None:
        """Add a micro-batch's shares of the mini-batch's losses, and its sums for the means."""
        if source:
            self._of_sources[source].add_loss(total, means)
        zero = torch.zeros_like(total.policy)
        entropy = zero if total.entropy is None else total.entropy
        kl = zero if total.kl is None else total.kl
        self._with_entropy |= total.entropy is not None
        self._with_kl |= total.kl is not None
        # Of several sources some have a loss that does not report a mean.
        values = [means[name].total if name in means else zero for name in self._names]
        values += [total.policy, entropy, kl, total.total.detach()]
        shares = torch.stack([value.float() for value in values])
        self._unread.append(lambda: self._read_losses(shares))
        for name in self._names:
            self._counts[name] += means[name].count if name in means else 0

    def end_step(self) -> None:
        """Read what was added since the last optimizer step."""
        for sums in self._of_sources.values():
            sums.end_step()
        for read in self._unread:
            read()
        self._unread.clear()

    def add_entropy(self, entropy: Tensor, source: str = "") -> None:
        """Add entropies [N] of tokens under the policy before this batch."""
        if source:
            self._of_sources[source].add_entropy(entropy)
        total = entropy.detach().sum(dtype=torch.float32)
        self._unread.append(lambda: self._read_entropy(total))
        self._entropy_tokens += entropy.numel()

    def add_probs_diff(self, trainer_logprobs: Tensor, behavior_logprobs: Tensor) -> None:
        """Add the trainer's and the engine's logprobs [N] of the same tokens."""
        trainer = trainer_logprobs.detach()
        self._unread.append(lambda: self._read_probs_diff(trainer, behavior_logprobs))

    def add_correction(self, statistics: Callable[[], Statistics]) -> None:
        """Add the statistics of rollout correction for a micro-batch, from what reads them."""
        self._unread.append(lambda: self._read_correction(statistics))

    def read_corrections(self) -> Statistics:
        """Return this rank's statistics of rollout correction so far."""
        self.end_step()
        return self._corrections

    def _read_losses(self, shares: Tensor) -> None:
        for name, value in zip(self._sums, shares.tolist(), strict=True):
            self._sums[name] += value

    def _read_entropy(self, total: Tensor) -> None:
        self._entropy_sum += float(total)

    def _read_probs_diff(self, trainer_logprobs: Tensor, behavior_logprobs: Tensor) -> None:
        sums = ProbsDiffSums.of_tokens(trainer_logprobs, behavior_logprobs)
        self._probs_diff = self._probs_diff.merge(sums)

    def _read_correction(self, statistics: Callable[[], Statistics]) -> None:
        self._corrections = merge_statistics(self._corrections, statistics())

    def metrics(self, parallel: ParallelContext, num_steps: int) -> dict[str, float]:
        """Return means over all ranks' tokens, and losses as means over `num_steps` steps.

        Collective: one vector of all numbers, so that metrics cost one exchange.
        """
        self.end_step()
        parts = {"": self, **self._of_sources}
        local = {name: part._to_vector() for name, part in parts.items()}
        sums = list(chain(*local.values()))
        diff = self._probs_diff.to_vector()
        corrections = statistics_to_vector(self._corrections)
        vectors = parallel.gather_rows([*sums, *diff, *corrections], "summing the update's metrics")
        totals = (sum(column) for column in zip(*(v[: len(sums)] for v in vectors), strict=True))
        metrics = self._merge_ranks([vector[len(sums) :] for vector in vectors], len(diff))
        for name, part in parts.items():
            values = part._metrics_of_totals(list(islice(totals, len(local[name]))), num_steps)
            metrics |= {source_metric(name, key): value for key, value in values.items()}
        return metrics

    def _to_vector(self) -> list[float]:
        """Return sums of losses, means and entropy, as `_metrics_of_totals` reads them."""
        return [
            *self._sums.values(),
            *self._counts.values(),
            self._entropy_sum,
            float(self._entropy_tokens),
            float(self._with_entropy),
            float(self._with_kl),
        ]

    def _metrics_of_totals(self, totals: Sequence[float], num_steps: int) -> dict[str, float]:
        """Return the metrics of vectors that were summed over all ranks."""
        sums = dict(zip(self._sums, totals, strict=False))
        counts = dict(zip(self._names, totals[len(self._sums) :], strict=False))
        entropy_sum, entropy_tokens, with_entropy, with_kl = totals[-4:]
        losses = {name: sums[name] / max(num_steps, 1) for name in LOSSES}
        if not with_entropy:
            del losses["actor/entropy_loss"]
        if not with_kl:
            del losses["actor/kl_loss"]
        means = {name: sums[name] / max(counts[name], 1.0) for name in self._names}
        entropy = {ENTROPY: entropy_sum / entropy_tokens} if entropy_tokens else {}
        return {**losses, **means, **entropy}

    def _merge_ranks(self, vectors: Sequence[Sequence[float]], num_diff: int) -> dict[str, float]:
        # These are no plain sums (they hold extremes too), so each has its own merge.
        probs_diff, corrections = ProbsDiffSums(), None
        for vector in vectors:
            probs_diff = probs_diff.merge(ProbsDiffSums.from_vector(vector[:num_diff]))
            of_rank = statistics_from_vector(self._corrections, vector[num_diff:])
            corrections = of_rank if corrections is None else merge_statistics(corrections, of_rank)
        return {**probs_diff.metrics(), **metrics_of(corrections or {})}
