"""Ends a request that lacks samples: with them broken off, or by its failure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.reward.collected_group import CollectedGroup
from services.reward.group_request import GroupFailedError
from sluice.types import FailureKind

logger = logging.getLogger(__name__)


def end_early(collected: CollectedGroup) -> None:
    """End a group that has taken its time or its tokens, as it stands.

    Raises:
        GroupFailedError: no sample of it has finished.
    """
    prompt_id, state = collected.request.prompt.prompt_id, collected.state()
    limits = "sluice.reward.group_deadline_s or group_token_budget"
    if not collected.request.budget.has_finished_samples:
        raise GroupFailedError(f"no sample finished within {limits}: {state}", FailureKind.ABORTED)
    logger.warning(
        "prompt %s: ended by %s without samples %s: %s",
        *(prompt_id, limits, collected.missing, state),
    )
    collected.end_unfinished()


def end_without_missing(collected: CollectedGroup, failures: Sequence[str]) -> None:
    """End a group that failed too often without the samples that nobody could generate.

    Raises:
        GroupFailedError: the request does not go without them, or no sample has finished.
    """
    request, missing = collected.request, collected.missing
    detail = f"{len(failures)} attempts failed, the last: {failures[-1]}"
    if not (request.allows_missing and request.budget.has_finished_samples):
        raise GroupFailedError(detail, FailureKind.ENGINE_ERROR)
    logger.warning(
        "prompt %s: goes on without samples %s: %s", request.prompt.prompt_id, missing, detail
    )
    request.budget.engine_errors.update(dict.fromkeys(missing, detail))
    collected.end_unfinished()
