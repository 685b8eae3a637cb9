"""What Prometheus reads of the reward service: the numbers of its status, taken when it asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.reward.assembly import RewardLoop
from services.reward.batch_history import BatchHistory
from services.reward.demand_meter import DemandMeter, FleetFacts
from services.reward.ledger import PromptState
from services.reward.statistics import SAMPLE_OUTCOMES
from sluice.config.run import RunConfig
from sluice.rpc.process_readings import ProcessName
from sluice.rpc.served_metrics import served_metrics
from sluice.service_contract import restarts
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import reward
from sluice.types import PromptEnd, TrainGroup

__all__ = ["BoundHistory", "RewardMetrics", "exported", "fleet_facts"]

_BY_STATISTIC = {
    "reward/groups_kept": reward.GROUPS_KEPT,
    "reward/groups_restarted": reward.GROUPS_RESTARTED,
    "reward/surplus_discarded": reward.GROUPS_SURPLUS,
    "reward/samples_graded": reward.SAMPLES_GRADED,
    "reward/tokens/received": reward.RECEIVED_TOKENS,
    "reward/reused_tokens": reward.REUSED_TOKENS,
    "reward/validation_groups": reward.VALIDATION_GROUPS,
    "reward/batches_acknowledged": reward.BATCHES,
    "reward/quarantine": reward.QUARANTINED,
    "reward/prompts_lost": reward.PROMPTS_LOST,
    "sampling/yield": reward.YIELD,
}
_AGAIN = {
    "scored": "reward/samples_scored_again",
    "generated": "reward/samples_generated_again",
}


class BoundHistory:
    """Counts the responses of batches that were as stale as is allowed.

    Args:
        max_staleness: versions; with 0 every response is at the bound, and none is counted.
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self.num_at_bound = 0

    def formed(self, groups: Sequence[TrainGroup], version: int) -> None:
        """A batch for `version` was formed."""
        if not self._max_staleness:
            return
        oldest = (rollout.oldest_version for group in groups for rollout in group.rollouts)
        self.num_at_bound += sum(
            one is not None and version - one >= self._max_staleness for one in oldest
        )


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Where the numbers are.

    Args:
        loop: the service's parts.
        history: of its batches.
        bound: of their stalest responses.
        demand: what they cost the fleet.
        batch_size: groups of a batch.
        max_staleness: versions.
    """

    loop: RewardLoop
    history: BatchHistory
    bound: BoundHistory
    demand: DemandMeter
    batch_size: int
    max_staleness: int

    def readings(self) -> Iterator[Reading]:
        """All of them; called in the event loop."""
        yield from self._prompts()
        yield from self._counted()
        yield from self._batch()
        yield from self.history.readings()
        yield from self._demanded()

    def _prompts(self) -> Iterator[Reading]:
        accounts = self.loop.ledger.accounts()
        yield reward.PROMPTS_SUBMITTED.at(float(accounts.num_submitted))
        for end in PromptEnd:
            yield reward.PROMPTS_ENDED.at(float(accounts.by_end.get(end, 0)), end)
        for state in PromptState:
            yield reward.PROMPTS.at(float(accounts.by_state.get(state, 0)), state)
        yield reward.GROUPS_QUEUED.at(float(self.loop.queue.num_waiting))
        yield reward.SAVED_SAMPLES.at(float(self.loop.ledger.saved_bytes or 0))

    def _counted(self) -> Iterator[Reading]:
        counts = self.loop.statistics()
        for name, instrument in _BY_STATISTIC.items():
            yield instrument.at(counts.get(name, 0.0))
        for outcome in SAMPLE_OUTCOMES:
            yield reward.SAMPLES.at(counts.get(f"reward/outcomes/{outcome}", 0.0), outcome)
        for what, name in _AGAIN.items():
            yield reward.SAMPLES_AGAIN.at(counts.get(name, 0.0), what)
        yield reward.SCORER_SECONDS.at(self.loop.recorder.scorer_seconds)

    def _batch(self) -> Iterator[Reading]:
        pipeline, num_kept = self.loop.pipeline, self.loop.batcher.num_kept
        yield reward.BATCH_GROUPS.at(float(self.batch_size))
        yield reward.BATCH_FILL.at(min(1.0, num_kept / self.batch_size))
        yield reward.BATCH_ASKED.at(float(pipeline.batches.is_asked))
        yield reward.RESPONSES_AT_BOUND.at(float(self.bound.num_at_bound))
        yield reward.MAX_STALENESS.at(float(self.max_staleness))
        if pipeline.policy_version is not None:
            yield reward.KNOWN_VERSION.at(float(pipeline.policy_version))
        yield reward.KNOWN_REPLICAS.at(float(len(self.loop.queue.replicas)))
        for wait, seconds in pipeline.awaited():
            # A lease's key goes on with the batch's id.
            yield reward.AWAITED.at(seconds, wait.key.partition(" ")[0])

    def _demanded(self) -> Iterator[Reading]:
        yield reward.SLOT_SECONDS.at(self.demand.slot_seconds)
        yield reward.STARVED_SECONDS.at(self.demand.starved_s)
        if (slots := self.demand.slots) is not None:
            yield reward.DEMAND_SLOTS.at(slots)
        if (replicas := self.demand.replicas) is not None:
            yield reward.DEMAND_REPLICAS.at(float(replicas))


def fleet_facts(loop: RewardLoop, num_batches: int) -> FleetFacts:
    """What demand depends on, now, after so many batches were formed."""
    replicas = loop.queue.replicas
    generates = loop.pipeline.num_generating > 0 or not replicas
    return FleetFacts(
        num_batches,
        loop.pipeline.batches.is_asked and generates,
        loop.queue.num_slots_in_use,
        sum(replica.info.slots for replica in replicas),
        len(replicas),
    )


@contextmanager
def exported(config: RunConfig, loop: RewardLoop, name: str) -> Iterator[None]:
    """Serves them while the block runs, if a port is set; else nothing is measured."""
    endpoint = config.sluice.reward.endpoint
    if endpoint.metrics_port is None:
        yield
        return
    history = BatchHistory()
    bound = BoundHistory(config.sluice.asynchrony.max_staleness)
    demand = DemandMeter(lambda: fleet_facts(loop, history.num_formed))

    def formed(groups: Sequence[TrainGroup], version: int, fill_s: float) -> None:
        history.formed(groups, version, fill_s)
        bound.formed(groups, version)

    loop.recorder.on_batch = formed
    metrics = RewardMetrics(
        loop,
        history,
        bound,
        demand,
        config.data.train_batch_size,
        config.sluice.asynchrony.max_staleness,
    )
    who = ProcessName("reward", name, restarts())
    with demand.looking(), served_metrics(config.sluice, endpoint, who, metrics.readings):
        yield
