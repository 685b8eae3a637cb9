"""The batch that was leased when the reward service died.

Its samples died with the service, but the trainer may hold it. What the trainer does next tells:
an acknowledgement, or the announcement of a later version: it was trained. Another call for a
batch, or another trainer: it was not, and its prompts wait again. They go on from the samples that
were saved of them.
"""

from __future__ import annotations

import logging

from services.reward.ledger import PromptLedger
from services.reward.outcomes import OutcomeRecorder
from services.reward.prompt_source import PromptSource
from services.reward.statistics import Discard
from sluice.types import PromptEnd

logger = logging.getLogger(__name__)


class RecoveredLease:
    """What becomes of it; its callers make sure that the service holds no lease itself.

    Args:
        ledger: knows which prompts were leased.
        recorder: ends or restarts them.
        source: issues them again.
    """

    def __init__(
        self, ledger: PromptLedger, recorder: OutcomeRecorder, source: PromptSource
    ) -> None:
        self._ledger, self._recorder, self._source = ledger, recorder, source
        self._trained_version: int | None = None  # that the batch was leased under

    def holds_back(self, version: int) -> bool:
        """Whether groups of `version` may not start: the trainer holds the batch of that version,
        or may hold it, and what was drawn under it could grow stale."""
        if self._ledger.open_lease is not None:
            return True
        return self._trained_version is not None and version <= self._trained_version

    def forget(self) -> None:
        """Another trainer begins, perhaps from an older version."""
        self._trained_version = None

    def trained(self, batch_id: str, step: int) -> None:
        """It was trained; harmless if that was known.

        Raises:
            NotFoundError: no such lease.
        """
        prompts = self._ledger.leased(batch_id)
        if prompts is None:
            return
        detail = f"rewards of batch {batch_id} were lost when the reward service started anew"
        for prompt in prompts:
            self._recorder.ended(prompt, PromptEnd.TRAINED, step=step, detail=detail)
        lease = self._ledger.open_lease
        self._trained_version = lease.version if lease else None
        self._recorder.acknowledged(len(prompts))
        self._ledger.acknowledge()

    def announced(self, version: int) -> None:
        """A trainer that has gone beyond its version has trained it."""
        lease = self._ledger.open_lease
        if lease is not None and lease.version < version:
            self.trained(lease.batch_id, lease.version + 1)

    def give_back(self) -> None:
        """It never arrived: its prompts wait again."""
        lease = self._ledger.open_lease
        if lease is None:
            return
        logger.warning("batch %s died with the service that leased it", lease.batch_id)
        for prompt in self._ledger.release_lease():
            self._recorder.restarted(prompt, Discard.TAKEN_OVER)
            self._source.put(prompt)
