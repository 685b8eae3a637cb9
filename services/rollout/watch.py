"""A replica's work as its watchdog sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from services.rollout.engines.protocol import EngineLoad
from sluice.concurrency.advance import units_done
from sluice.concurrency.stall import WorkState
from sluice.concurrency.watchdog import watched_service
from sluice.config.run import RunConfig


def watching(
    config: RunConfig, name: str, load: Callable[[], EngineLoad], address: str
) -> AbstractContextManager[None]:
    """A replica's watchdog.

    Progress are tokens drawn and versions taken. There is work while samples run or wait for a
    slot; one without weights or without prompts is idle.
    """

    def work_state() -> WorkState:
        found = load()
        progress = (found.generated_tokens, found.busy_seconds, found.version, units_done())
        return WorkState(progress, found.slots_busy + found.queued > 0)

    return watched_service(name, config.sluice, work_state, address=address)
