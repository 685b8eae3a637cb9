"""A group that ended, with everything a reader wants to see of it: one line of the archive."""

from __future__ import annotations

import msgspec

from sluice.types import Failed, GradedGroup, Outcome, Prompt, PromptEnd, Rollout

__all__ = ["SampledGroup", "SampledResponse", "sampled_group", "shortened_middle"]

_CUT = "\n[… {} characters left out …]\n"


class SampledResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response.

    Args:
        text: what was generated; the middle of a long one is left out, see `shortened_middle`.
        tokens: its length.
        finish: why it ended, a `FinishReason`.
        score: the scorer's number; null without one.
        reward: the score with its shaping.
        failure: why there is no score; empty if there is one.
        versions: oldest and newest policy version that drew a token; null if there is none.
        metrics: further numbers of the scorer.
    """

    text: str
    tokens: int
    finish: str
    score: float | None = None
    reward: float | None = None
    failure: str = ""
    versions: tuple[int, int] | None = None
    metrics: dict[str, float | None] = {}


class SampledGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group.

    Args:
        prompt_id: its prompt.
        end: how it ended, a `PromptEnd`.
        version: policy version announced when it started.
        ended_at: seconds since 1970.
        prompt: the text of all turns.
        step: that trained it; null for others.
        ground_truth: what the scorer compared with.
        data_source: what the prompt was taken from.
        replicas: who generated it, in the order first asked.
        responses: in the order of samples; none if nothing was graded.
    """

    prompt_id: str
    end: str
    version: int
    ended_at: float
    prompt: str
    step: int | None = None
    ground_truth: str = ""
    data_source: str = ""
    replicas: list[str] = []
    responses: list[SampledResponse] = []


def sampled_group(
    prompt: Prompt,
    end: PromptEnd,
    graded: GradedGroup | None,
    *,
    version: int,
    step: int | None,
    ended_at: float,
    replicas: list[str],
    most_chars: int,
) -> SampledGroup:
    """What the archive keeps of a group.

    Args:
        graded: its samples with their outcomes; ``None`` if there are none.
        most_chars: of the prompt and of each response.
    """
    pairs = zip(graded.group.rollouts, graded.outcomes, strict=True) if graded else ()
    return SampledGroup(
        prompt_id=prompt.prompt_id,
        end=end.value,
        version=version,
        ended_at=ended_at,
        prompt=shortened_middle("\n".join(turn.content for turn in prompt.messages), most_chars),
        step=step,
        ground_truth=shortened_middle(prompt.ground_truth, most_chars),
        data_source=prompt.data_source,
        replicas=replicas,
        responses=[_response(rollout, outcome, most_chars) for rollout, outcome in pairs],
    )


def shortened_middle(text: str, most_chars: int) -> str:
    """`text`, or of a longer one its beginning and its end, with a mark that counts the rest.

    The end gets a quarter: a response's answer is usually there.
    """
    left_out = len(text) - most_chars
    if left_out <= 0:
        return text
    tail = most_chars // 4
    return text[: most_chars - tail] + _CUT.format(left_out) + text[len(text) - tail :]


def _response(rollout: Rollout, outcome: Outcome, most_chars: int) -> SampledResponse:
    versions = [span.version for span in rollout.version_spans]
    text = shortened_middle(rollout.text, most_chars)
    sampled_by = (min(versions), max(versions)) if versions else None
    if isinstance(outcome, Failed):
        failure = shortened_middle(f"{outcome.kind.value}: {outcome.detail}", most_chars)
        return SampledResponse(
            text,
            rollout.num_tokens,
            rollout.finish_reason.value,
            failure=failure,
            versions=sampled_by,
        )
    return SampledResponse(
        text,
        rollout.num_tokens,
        rollout.finish_reason.value,
        outcome.score,
        outcome.reward,
        versions=sampled_by,
        metrics=dict(outcome.metrics),
    )
