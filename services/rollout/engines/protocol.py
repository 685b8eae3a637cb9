"""What every inference engine offers its rollout service.

Tokens in, tokens out. An engine generates groups (all requested samples of one prompt share the
prompt's prefill). It reports for each token its logprob under the distribution that sampled it, and
the policy version that did, and it takes new weights while it generates. All methods are called
from one event loop; none may block it. `check_request` and `check_capacity` hold the rules of a
request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.rollout.engines.text import Decode, StopStringWatch
from sluice.algorithm.accounting import ReplicaCounters
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.types import (
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Rollout,
    RoutedExperts,
    SamplingParams,
    TensorSpec,
    TokenIds,
    TransferGroupSpec,
)
from sluice.weight_share import WeightShare


@dataclass(slots=True, eq=False)
class CallTokens:
    """Tokens of one call; used from the event loop only.

    Attributes:
        sampled: by the engine; complete when `Engine.generate` has ended.
        sent: to the caller.
    """

    sampled: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Samples to generate for one prompt.

    The random numbers of sample *i*, token *t* depend on (`sampling.seed`, i, t) only.

    Attributes:
        sampling: how to sample; its `max_tokens` counts a partial's tokens too.
        partials: what came earlier of samples that are continued.
        tokens: of this call.
        priority: higher ones get free slots first, if the engine supports priorities.
        decode: needed for `sampling.stop` only.
        images: encoded files, in the order of their (expanded) placeholder tokens in the prompt.
        for_direct_client: the caller is no service of the run; its tokens are counted apart.
        with_routing: finished samples come with their experts, if the engine notes them.
        affinity: names the conversation that the prompt continues and that a later one may
            continue; empty: nothing is kept for it.
        with_prompt_logprobs: one chunk has the logprobs of the prompt, unless all samples are
            complete partials.
    """

    request_id: str
    prompt_token_ids: TokenIds  # [prompt tokens]
    sample_indexes: tuple[int, ...]
    sampling: SamplingParams
    partials: tuple[Rollout, ...] = ()
    tokens: CallTokens = field(default_factory=CallTokens)
    priority: int = 0
    decode: Decode | None = None
    images: tuple[bytes, ...] = ()
    for_direct_client: bool = False
    with_routing: bool = False
    affinity: str = ""
    with_prompt_logprobs: bool = False

    def watch(self) -> StopStringWatch | None:
        """Return a watch for one of its samples, if strings can end it."""
        if not self.sampling.stop or self.decode is None:
            return None
        return StopStringWatch(self.sampling.stop, self.decode)


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunk:
    """New tokens of one sample, all from one version.

    `finish_reason` is set on a sample's last chunk (which may hold no tokens). That chunk may have
    the `routing` of the whole sample; see `sluice.types.Turn`. Of a request for `prompt_logprobs`
    one chunk has them, with or without tokens.
    """

    sample_index: int
    token_ids: TokenIds  # [new tokens]
    behavior_logprobs: Logprobs  # [new tokens]
    version: int
    finish_reason: FinishReason | None
    routing: RoutedExperts | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(slots=True, eq=False)
class SentTokens:
    """What became of tokens for callers of one kind.

    Attributes:
        sent: to callers.
        unsent: of calls that ended earlier.
    """

    sent: int = 0
    unsent: int = 0


@dataclass(slots=True, eq=False)
class RequestTokens:
    """The sent and the unsent tokens of all requests of an engine.

    Used from the event loop only. `generation.GenerationRunner` alone counts: tokens as it sends
    them, and a call's unsent sampled tokens when the call ends.

    Attributes:
        services: tokens for services of the run.
        direct: tokens for all other callers.
    """

    services: SentTokens = field(default_factory=SentTokens)
    direct: SentTokens = field(default_factory=SentTokens)

    def of(self, request: GenerationRequest) -> SentTokens:
        """Return the counters for tokens of a request."""
        return self.direct if request.for_direct_client else self.services


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad(ReplicaCounters):
    """The engine's counters and what it serves, at one moment.

    Attributes:
        slots: sequences that can run at once.
        version: the policy version that serves; ``None`` before the first weights.
        weight_digest: its digest; empty before the first weights.
        slots_may_wait: a sample with a slot may still wait for others, for space in the KV cache.
        kv_tokens: tokens that the KV cache holds; 0: not known, or enough for all slots.
    """

    slots: int
    version: int | None
    weight_digest: str
    slots_may_wait: bool = False
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is complete in staging memory; `parts` has the digest of each part."""

    version: int
    digest: str
    received_bytes: int
    seconds: float
    parts: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """One replica's engine."""

    @property
    def accounting(self) -> RequestTokens:
        """What became of tokens; the code that sends them writes it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens a sample may have."""
        ...

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        """The weights the engine expects, in the order of the wire."""
        ...

    @property
    def weight_shares(self) -> Sequence[WeightShare]:
        """The weights that each of its workers takes; empty: each takes all of them."""
        ...

    async def start(self) -> None:
        """Build the model, without weights or with those of its files.

        Raises:
            CheckpointError: a file of weights that it is to serve is missing or damaged.
            ConfigError: the path holds no model.
        """
        ...

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        ...

    async def check_alive(self) -> EngineLoad:
        """Ask the loop that computes tokens, so that a hung engine does not answer."""
        ...

    def load(self) -> EngineLoad:
        """Return the latest snapshot, without waiting."""
        ...

    def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        """Generate the samples; yield what has come since the last yield.

        With `every_token` false a sample's tokens come in few chunks, at the latest when it
        finishes; with `partial_interval_s` unfinished samples get a chunk about that often too.
        Closing the iterator, or cancelling its consumer, aborts the samples and frees their slots
        before the next decode step. The yielded part is complete up to its last token, and can be
        continued (`GenerationRequest.partials`); the rest is lost. At the end `request.tokens` has
        the number of all sampled tokens.

        Raises:
            InvalidRequestError: prompt and response do not fit `max_model_len`, or the samples are
                more than the engine takes when it is idle.
            NotReadyError: no weights yet.
            ExhaustedError: too many samples are waiting.
            EngineError: the engine broke.
        """
        ...

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""
        ...

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version into staging memory while generation continues."""
        ...

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swap the staged version in between two decode steps. Idempotent.

        Returns:
            the seconds without a token; 0 if it served already.

        Raises:
            WeightSyncError: nothing staged under that version, or another digest.
        """
        ...

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Discard the staged weights and leave the group. Idempotent."""
        ...

    async def sleep(self) -> bool:
        """Free memory of the device until the next `join_group` or `stage`; sample nothing then.

        The weights stay, and samples continue afterwards. Idempotent. Until then `commit` raises
        NotReadyError.

        Returns:
            whether it sleeps; an engine that cannot does nothing.
        """
        ...


# Every slot holds as many as the longest list of any request, hence a limit.
MAX_STOP_TOKEN_IDS = 64


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request whose values are in their ranges, but not within the engine's.

    Raises:
        InvalidRequestError: names the field.
    """
    stops = request.sampling.stop_token_ids
    if len(stops) > MAX_STOP_TOKEN_IDS or max(stops, default=0) >= vocab_size:
        raise InvalidRequestError(
            f"sampling.stop_token_ids: {len(stops)} ids up to {max(stops)}; give at most "
            f"{MAX_STOP_TOKEN_IDS}, each below {vocab_size}"
        )
    continued = [partial.sample_index for partial in request.partials]
    if len(set(continued)) != len(continued) or not set(continued) <= set(request.sample_indexes):
        raise InvalidRequestError(
            f"request {request.request_id}: partials of samples {continued}; give at most one for "
            f"each of the requested {request.sample_indexes}"
        )
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
