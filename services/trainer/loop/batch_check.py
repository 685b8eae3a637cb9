"""The check of a received train batch against the run's terms, before it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sluice.algorithm.groups.filter import MIN_SHARE, min_scored_samples
from sluice.config.derived import needs_greedy_baseline, needs_whole_groups
from sluice.config.run import RunConfig
from sluice.config.sources import source_configs
from sluice.errors import PeerError
from sluice.types import LARGEST_NUMBER, Rollout, Scored, TrainBatch, TrainGroup


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """The terms that every batch of a run must meet.

    Args:
        num_groups: groups in a batch (``data.train_batch_size``).
        samples_per_group: samples of a prompt (``rollout.n``). A group may have fewer, since
            samples can fail, but at least `min_scored_samples`.
        max_staleness: versions that a sample's oldest token may be behind the updated version.
        whole_groups: no sample may be missing, since the loss compares all of a group.
        with_baselines: every group has the reward of a greedy response.
        min_share: least share of its samples that a group must have
            (``sluice.reward.outcomes.min_share``).
        sources: the terms of the groups of each of several sources, by name.
    """

    num_groups: int
    samples_per_group: int
    max_staleness: int
    whole_groups: bool = False
    with_baselines: bool = False
    min_share: float = MIN_SHARE
    sources: Mapping[str, BatchTerms] = field(default_factory=dict)

    def for_group(self, group: TrainGroup) -> BatchTerms | None:
        """Return the terms of a group; ``None`` if the run lacks its source."""
        if not self.sources and not group.source:
            return self
        return self.sources.get(group.source)

    @property
    def min_scored_samples(self) -> int:
        """Return the fewest samples of a group."""
        return min_scored_samples(
            self.samples_per_group, whole_groups=self.whole_groups, min_share=self.min_share
        )


def batch_terms(config: RunConfig) -> BatchTerms:
    """Return the terms of a run."""
    return BatchTerms(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        config.sluice.asynchrony.max_staleness,
        whole_groups=needs_whole_groups(config),
        with_baselines=needs_greedy_baseline(config),
        min_share=config.sluice.reward.outcomes.min_share,
        sources={name: batch_terms(c) for name, c in source_configs(config).items() if name},
    )


def check_batch(batch: TrainBatch, terms: BatchTerms, step: int) -> None:
    """Refuse a batch that must not be trained.

    Args:
        batch: the batch received for `step`; its tokens may be absent.
        step: from 1; it updates version ``step - 1`` to version ``step``.

    Raises:
        PeerError: names the batch, the group, the sample and the problem.
    """
    for problem in _problems(batch, terms, step - 1):
        raise PeerError(
            "reward service",
            f"handing out the batch of step {step}",
            f"batch {batch.batch_id}, {problem}; the batch is refused and was not trained",
        )


def _problems(batch: TrainBatch, terms: BatchTerms, version: int) -> Iterator[str]:
    if batch.policy_version != version:
        yield f"formed for version {batch.policy_version}, but version {version} is updated"
    if len(batch.groups) != terms.num_groups:
        yield f"{len(batch.groups)} groups instead of {terms.num_groups}"
    prompt_ids: set[str] = set()  # a prompt twice in a batch would be trained twice
    for group in batch.groups:
        name = f"group {group.prompt_id}"
        if group.prompt_id in prompt_ids:
            yield f"{name}: it is in the batch twice"
        prompt_ids.add(group.prompt_id)
        yield from (f"{name}: {problem}" for problem in _group_problems(group, terms))
        for rollout, scored in zip(group.rollouts, group.scores, strict=False):
            sample = f"{name}, sample {rollout.sample_index}"
            if group.images and any(turn.is_new_root for turn in rollout.turns):
                yield (
                    f"{sample}: a turn begins without the prompt, whose images it may have read; "
                    "episodes with images must continue their prompt"
                )
            problems = _sample_problems(rollout, scored, terms.max_staleness, version)
            yield from (f"{sample}: {problem}" for problem in problems)


def _group_problems(group: TrainGroup, of_run: BatchTerms) -> Iterator[str]:
    terms = of_run.for_group(group)
    if terms is None:
        yield (
            f"it is of the source '{group.source}', which sluice.sources does not have; run the "
            "reward service with the same configuration"
        )
        return
    num_samples = len(group.rollouts)
    if not terms.min_scored_samples <= num_samples <= terms.samples_per_group:
        expected = f"{terms.min_scored_samples}..{terms.samples_per_group}"
        yield f"{num_samples} samples, expected {expected}"
    if len(group.scores) != num_samples:
        yield f"{len(group.scores)} scores for {num_samples} samples"
    indices = [rollout.sample_index for rollout in group.rollouts]
    if len(set(indices)) != num_samples:
        yield f"sample indices {indices} repeat"
    if not group.prompt_token_ids.size:
        yield "the prompt holds no tokens"
    if group.baseline_reward is not None and not abs(group.baseline_reward) <= LARGEST_NUMBER:
        yield f"its baseline_reward is {group.baseline_reward}"
    if group.baseline_reward is None and terms.with_baselines:
        yield (
            "it has no baseline_reward, the greedy response's reward that the run's "
            "algorithm.adv_estimator needs of every group; run the reward service with the same "
            "configuration"
        )


def _sample_problems(
    rollout: Rollout, scored: Scored, max_staleness: int, version: int
) -> Iterator[str]:
    if not abs(scored.reward) <= LARGEST_NUMBER:
        yield f"its reward is {scored.reward}"
    newest = max((span.version for span in rollout.version_spans), default=version)
    if newest > version:
        yield f"tokens of version {newest}, but version {version} is the newest there is"
    oldest = rollout.oldest_version
    if oldest is not None and version - oldest > max_staleness:
        yield (
            f"tokens of version {oldest} are {version - oldest} versions behind version {version}, "
            f"sluice.asynchrony.max_staleness allows {max_staleness}"
        )
