"""What Prometheus reads of a replica: its engine's counters, taken when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from services.rollout.engines.protocol import EngineLoad
from sluice.config.run import RunConfig
from sluice.rpc.process_readings import ProcessName
from sluice.rpc.served_metrics import served_metrics
from sluice.service_contract import restarts
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import rollout

__all__ = ["exported", "load_readings"]


def load_readings(load: EngineLoad) -> Iterator[Reading]:
    """The engine's counters."""
    yield rollout.OWN_SLOTS.at(float(load.slots))
    yield rollout.OWN_SLOTS_BUSY.at(float(load.slots_busy))
    yield rollout.OWN_QUEUE.at(float(load.queued))
    yield rollout.OWN_VERSION.at(float(-1 if load.version is None else load.version))
    yield rollout.GENERATED.at(float(load.generated_tokens))
    yield rollout.UNSENT.at(float(load.unsent_tokens))
    yield rollout.RUNNING.at(float(load.running_tokens))
    yield rollout.DIRECT.at(float(load.direct_sent_tokens + load.direct_unsent_tokens))
    yield rollout.BUSY_SECONDS.at(load.busy_seconds)
    for state, seconds in load.seconds_by_state.items():
        yield rollout.STATE_SECONDS.at(seconds, state)


def exported(
    config: RunConfig, name: str, load: Callable[[], EngineLoad]
) -> AbstractContextManager[None]:
    """Serves them while the block runs, if a port is set.

    Args:
        config: the run's.
        name: the replica's.
        load: its engine's latest counters.
    """
    who = ProcessName("rollout", name, restarts())
    endpoint = config.sluice.rollout.endpoint
    return served_metrics(config.sluice, endpoint, who, lambda: load_readings(load()))
