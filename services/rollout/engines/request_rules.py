"""Check a request before it enters an engine, and decode the images of one prompt at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.rollout.engines.protocol import GenerationRequest
from sluice.concurrency.waits import waiting_for
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.types import SamplingParams

# Every slot holds as many as the longest list of any request, hence a limit.
MAX_STOP_TOKEN_IDS = 64
ResultT = TypeVar("ResultT")


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequestError for a request that cannot be generated, naming the field."""
    _check_sampling(request.sampling, vocab_size)
    _check_samples(request)
    if request.sampling.stop and (request.decode is None or "" in request.sampling.stop):
        raise InvalidRequestError(
            f"request {request.request_id}: sampling.stop {request.sampling.stop}; give texts that "
            "are not empty, and decode with them"
        )
    prompt = request.prompt_token_ids
    if not 1 <= prompt.size < max_model_len:
        raise InvalidRequestError(
            f"request {request.request_id}: the prompt has {prompt.size} tokens; give 1 to "
            f"{max_model_len - 1}, so that a response token fits max_model_len {max_model_len}"
        )
    for partial in request.partials:
        if prompt.size + partial.token_ids.size > max_model_len:
            raise InvalidRequestError(
                f"request {request.request_id}: prompt and partial sample {partial.sample_index} "
                f"have {prompt.size + partial.token_ids.size} tokens; max_model_len is "
                f"{max_model_len}"
            )
    for tokens in (prompt, *(partial.token_ids for partial in request.partials)):
        if tokens.size and int(tokens.max()) >= vocab_size:
            raise InvalidRequestError(
                f"request {request.request_id}: token id {int(tokens.max())}; the vocabulary has "
                f"{vocab_size}"
            )


def check_capacity(request: GenerationRequest, under_way: int, slots: int, max_queued: int) -> None:
    """Refuse a request whose samples do not fit an engine with `under_way` open samples.

    Args:
        under_way: samples that run or wait.
        slots: samples that run at once.
        max_queued: samples that may wait for a slot.

    Raises:
        ExhaustedError: they do not fit at present.
        InvalidRequestError: they would not even fit an idle engine.
    """
    samples = len(request.sample_indexes)
    if samples > slots + max_queued:
        raise InvalidRequestError(
            f"request {request.request_id}: {samples} samples; the engine takes {slots} in slots "
            f"(actor_rollout_ref.rollout.max_num_seqs) and {max_queued} waiting "
            "(sluice.rollout.max_queued): request fewer at once, or raise one of these"
        )
    if under_way + samples > slots + max_queued:
        raise ExhaustedError(
            f"request {request.request_id}: {under_way + samples} samples would be under way; the "
            f"engine takes {slots} in slots and {max_queued} waiting: try later"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    stops = sampling.stop_token_ids
    if len(stops) > MAX_STOP_TOKEN_IDS or max(stops, default=0) >= vocab_size:
        raise InvalidRequestError(
            f"sampling.stop_token_ids: {len(stops)} ids up to {max(stops)}; give at most "
            f"{MAX_STOP_TOKEN_IDS}, each below {vocab_size}"
        )
    rules = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), ">= 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k == -1 or sampling.top_k >= 1, "-1 or >= 1"),
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, ">= 1"),
    )
    for name, value, holds, allowed in rules:
        if not holds:
            raise InvalidRequestError(f"sampling.{name} is {value}; it must be {allowed}")


def _check_samples(request: GenerationRequest) -> None:
    indexes = request.sample_indexes
    if not indexes or len(set(indexes)) != len(indexes):
        raise InvalidRequestError(
            f"request {request.request_id}: sample_indexes {indexes}; give each wanted index once"
        )
    continued = [partial.sample_index for partial in request.partials]
    if len(set(continued)) != len(continued) or not set(continued) <= set(indexes):
        raise InvalidRequestError(
            f"request {request.request_id}: partials of samples {continued}; give at most one for "
            f"each of the requested {indexes}"
        )


class ImageTurn:
    """The turn to decode a prompt's images; used in one event loop.

    Attributes:
        samples: of the prompts whose images are being decoded, or wait.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._turn = asyncio.Semaphore(1)

    async def read(self, samples: int, decode: Callable[[], ResultT]) -> ResultT:
        """Run `decode` in a thread, as soon as no other one runs; return its result.

        A thread cannot be interrupted. So a cancelled caller keeps its turn until its thread has
        ended, and callers that come and leave never have two decoders at work.

        Args:
            samples: of the prompt.
            decode: called in a thread, so neither the event loop nor the step loop waits.
        """
        self.samples += samples
        try:
            with waiting_for("image decoder", "decoding a prompt's images"):
                await self._turn.acquire()
                decoding = asyncio.get_running_loop().run_in_executor(None, decode)
                decoding.add_done_callback(self._has_ended)
                return await asyncio.shield(decoding)
        finally:
            self.samples -= samples

    def _has_ended(self, decoding: asyncio.Future[ResultT]) -> None:
        self._turn.release()
        if not decoding.cancelled():
            decoding.exception()  # the caller was cancelled: read the error, or asyncio warns
