"""Which new tokens SGLang's scheduler sends and which it holds; used in the scheduler's process.

To send each token costs the scheduler a message and the client a pass for every sample and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

EVERY_TOKEN = 1
"""``stream_interval`` of a sample whose tokens are sent as they come; the others' is not set."""
_HOLD_S = 0.25


class TokenHold:
    """Chooses the samples whose tokens are sent after a step.

    Args:
        now_s: a monotonic clock, seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._due_s = now_s()

    def choose(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return those that are sent: about four times a second all of them.

        In between only those that ended, whose tokens are wanted one by one, or that have their
        first token: it says that the prompt is in the cache.
        """
        chosen = [one for one in samples if not _may_wait(one)]
        now_s = self._now_s()
        if len(chosen) == len(samples) or now_s < self._due_s:
            return chosen
        self._due_s = now_s + _HOLD_S
        return samples


def _may_wait(sample: Any) -> bool:  # noqa: ANN401 - a request of SGLang's scheduler
    return (
        sample.stream
        and sample.send_token_offset > 0
        and sample.sampling_params.stream_interval != EVERY_TOKEN
        and not sample.finished()
    )


def held_samples(scheduler: Any) -> list[Any]:  # noqa: ANN401 - SGLang's
    """Return the samples with tokens that were not sent.

    Retracted ones wait in its queue, or are computed again a chunk at a time.
    """
    batches = (scheduler.running_batch, scheduler.last_batch)
    found = [*scheduler.waiting_queue]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    found += [one for batch in batches if batch is not None for one in batch.reqs]
    return [
        one
        for one in {id(one): one for one in found}.values()
        if one.stream and not one.finished() and len(one.output_ids) > one.send_token_offset
    ]
