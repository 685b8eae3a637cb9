"""Generate one greedy response beside the samples: the baseline of ReMax (arXiv 2310.10505).

Consumes: the request for the samples and how the greedy response is drawn. Waits for: both, at the
same time and maybe on different replicas. Produces: both groups. On failure of one the other is
cancelled and the prompt fails, since samples without a baseline cannot be trained on. On
cancellation both streams end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.request import (
    GroupFailedError,
    GroupRequest,
    OldestStart,
    SampleCallback,
    StartCallback,
    decisive,
    first_samples,
    for_prompt,
)
from sluice.types import FailureKind, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class GeneratedGroup:
    """A prompt's samples and, where a baseline is asked for, its greedy response."""

    samples: RolloutGroup
    greedy: RolloutGroup | None = None

    @property
    def num_greedy_tokens(self) -> int:
        """Length of the greedy response; 0 without one."""
        return self.greedy.num_response_tokens if self.greedy else 0

    @property
    def num_response_tokens(self) -> int:
        """All that was drawn."""
        return self.samples.num_response_tokens + self.num_greedy_tokens


async def generate_group(
    dispatcher: GroupDispatcher,
    request: GroupRequest,
    greedy: SamplingParams | None,
    on_start: StartCallback,
    on_sample: SampleCallback | None = None,
) -> GeneratedGroup:
    """Generate a prompt's samples and, with `greedy`, one response drawn by it.

    Args:
        dispatcher: where groups are generated.
        request: the samples; the greedy response keeps to the same versions.
        greedy: how the response is drawn; ``None``: none is.
        on_start: told the oldest version among the tokens of both, whenever it changes.
        on_sample: told of each sample that has finished; not of the greedy response.

    Raises:
        GroupFailedError: samples or response cannot be had; the detail of the response's failure
            begins with its `FailureKind`.
        SluiceError: whatever else ends the generation of a group; the gravest of the two.
    """
    if greedy is None:
        return GeneratedGroup(await dispatcher.generate(request, on_start, on_sample))
    beside = replace(
        request,
        sample_indexes=first_samples(1),
        sampling=for_prompt(greedy, request.prompt, stage="greedy"),
        allows_missing=False,
    )
    oldest = OldestStart(on_start)
    try:
        async with asyncio.TaskGroup() as tasks:
            name = f"prompt {request.prompt.prompt_id}"
            samples = tasks.create_task(
                dispatcher.generate(request, oldest.of("samples"), on_sample),
                name=f"{name}, samples",
            )
            response = tasks.create_task(
                _response(dispatcher, beside, oldest.of("greedy")), name=f"{name}, greedy"
            )
    except ExceptionGroup as group:
        raise decisive(group) from group
    return GeneratedGroup(samples.result(), response.result())


async def _response(
    dispatcher: GroupDispatcher, request: GroupRequest, on_start: StartCallback
) -> RolloutGroup:
    try:
        return await dispatcher.generate(request, on_start)
    except GroupFailedError as error:
        if type(error) is not GroupFailedError:
            raise  # it is the prompt that is refused, by a name that says why
        kind = error.kind or FailureKind.ENGINE_ERROR
        raise GroupFailedError(
            f"{kind}: no greedy response, the baseline of its samples: {error}",
            error.kind,
        ) from error
