"""The page's data as JSON objects."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sluice.dashboard.page_request import cursor_text
from sluice.dashboard.sample_browser import FoundGroup, Page
from sluice.dashboard.sample_lines import Kind, ShownOutcome
from sluice.telemetry.sampled_group import SampledResponse

__all__ = ["group_object", "page_object"]

_EXCERPT_CHARS = 160


def page_object(page: Page, counts: dict[str, int]) -> dict[str, Any]:
    """A page of the list.

    Args:
        counts: indexed groups by outcome.
    """
    return {
        "groups": [_row(found) for found in page.groups],
        "next": cursor_text(page.next),
        "num_matching": page.num_matching,
        "num_searched": page.num_searched,
        "counts": counts,
    }


def group_object(found: FoundGroup) -> dict[str, Any]:
    """A group whole."""
    group = found.group
    return {
        **_row(found),
        "prompt": group.prompt,
        "ground_truth": group.ground_truth,
        "data_source": group.data_source,
        "replicas": group.replicas,
        "ended_at": group.ended_at or None,
        "responses": [_response(response) for response in group.responses],
    }


def _row(found: FoundGroup) -> dict[str, Any]:
    entry, group = found.entry, found.group
    is_validation = entry.outcome is ShownOutcome(Kind.VALIDATION.value)
    versions = [v for response in group.responses for v in response.versions or ()]
    return {
        "id": entry.ordinal,
        "prompt_id": group.prompt_id,
        "step": entry.step,
        "outcome": entry.outcome.value,
        "is_trained": group.step is not None,
        "versions": _versions(versions, group.version, is_validation=is_validation),
        "mean_score": None if math.isnan(entry.mean_score) else round(entry.mean_score, 4),
        "scores": [response.score for response in group.responses],
        "excerpt": group.prompt[:_EXCERPT_CHARS],
    }


def _versions(versions: list[int], announced: int, *, is_validation: bool) -> list[int] | None:
    """Oldest and newest version that drew a token, as far as that is known."""
    if versions:
        return [min(versions), max(versions)]
    return [announced, announced] if is_validation else None


def _response(response: SampledResponse) -> dict[str, Any]:
    return dict(msgspec.structs.asdict(response))
