"""One greedy response beside a prompt's samples: the baseline of ReMax (arXiv 2310.10505, §4.1).

Consumes: the request for the samples and how the greedy response is drawn. Waits for: both, at the
same time and maybe on different replicas. Produces: both groups. On failure of one the other is
cancelled and the prompt fails, since samples without a baseline cannot be trained on. On
cancellation both streams end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from services.reward.dispatcher import (
    GroupDispatcher,
    GroupFailedError,
    GroupRequest,
    StartCallback,
    first_samples,
)
from services.reward.sampling import for_prompt
from sluice.concurrency.exception_leaves import leaves
from sluice.errors import SluiceError
from sluice.types import FailureKind, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class DrawnGroup:
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
) -> DrawnGroup:
    """Generate a prompt's samples and, with `greedy`, one response drawn by it.

    Args:
        dispatcher: where groups are generated.
        request: the samples; the greedy response keeps to the same versions.
        greedy: how the response is drawn; ``None``: none is.
        on_start: told the oldest version among the tokens of both, whenever it changes.

    Raises:
        GroupFailedError: samples or response cannot be had; the detail of the response's failure
            begins with its `FailureKind`.
        SluiceError: whatever else ends the generation of a group; the gravest of the two.
    """
    if greedy is None:
        return DrawnGroup(await dispatcher.generate(request, on_start))
    beside = replace(
        request,
        sample_indexes=first_samples(1),
        sampling=for_prompt(greedy, request.prompt, stage="greedy"),
    )
    oldest = _OldestStart(on_start)
    try:
        async with asyncio.TaskGroup() as tasks:
            name = f"prompt {request.prompt.prompt_id}"
            samples = tasks.create_task(
                dispatcher.generate(request, oldest.samples_started), name=f"{name}, samples"
            )
            response = tasks.create_task(
                _response(dispatcher, beside, oldest.greedy_started), name=f"{name}, greedy"
            )
    except ExceptionGroup as group:
        raise _failure(group) from group
    return DrawnGroup(samples.result(), response.result())


async def _response(
    dispatcher: GroupDispatcher, request: GroupRequest, on_start: StartCallback
) -> RolloutGroup:
    try:
        return await dispatcher.generate(request, on_start)
    except GroupFailedError as error:
        if type(error) is not GroupFailedError:
            raise  # it is the prompt that is refused, by a name that says why
        raise GroupFailedError(
            f"{FailureKind.ENGINE_ERROR}: no greedy response, the baseline of its samples: {error}"
        ) from error


def _failure(group: ExceptionGroup[Exception]) -> Exception:
    """The error that decides the prompt's fate; the whole group if it holds a defect."""
    found = leaves(group)
    errors = [error for error in found if isinstance(error, SluiceError)]
    return max(errors, key=_gravity) if len(errors) == len(found) else group


def _gravity(error: SluiceError) -> int:
    """What all prompts would meet, then what is said of this prompt, then what one group met."""
    if not isinstance(error, GroupFailedError):
        return 2
    return int(type(error) is not GroupFailedError)


class _OldestStart:
    """The older of the versions under which samples and greedy response began."""

    def __init__(self, on_start: StartCallback) -> None:
        self._on_start = on_start
        self._samples: int | None = None
        self._greedy: int | None = None

    def samples_started(self, version: int | None) -> None:
        self._samples = version
        self._tell()

    def greedy_started(self, version: int | None) -> None:
        self._greedy = version
        self._tell()

    def _tell(self) -> None:
        started = [version for version in (self._samples, self._greedy) if version is not None]
        self._on_start(min(started, default=None))
