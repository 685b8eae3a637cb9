"""The Protocol that every inference engine implements.

Tokens in, tokens out. An engine generates groups (all requested samples of a prompt share its
prefill). For each token it reports the logprob under the distribution that sampled it and the
policy version that did. It accepts new weights while it generates. All methods are called from one
event loop; none may block it. `check_request` and `check_capacity` check requests.

`threaded_engine.ThreadedEngine` implements the Protocol; engines differ in its core.
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
    """Token counts of one call; used from the event loop only.

    Attributes:
        sampled: tokens that the engine sampled; complete when `Engine.generate` has ended.
        sent: tokens sent to the caller.
    """

    sampled: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Samples to generate for one prompt.

    The random numbers of token *t* of sample *i* depend only on (`sampling.seed`, i, t).

    Attributes:
        sampling: how to sample; its `max_tokens` counts a partial's tokens too.
        partials: earlier tokens of samples to continue.
        tokens: token counts of this call.
        priority: higher ones get free slots first, if the engine supports priorities.
        decode: needed for `sampling.stop` only.
        images: encoded files, in the order of their (expanded) placeholder tokens in the prompt.
        for_direct_client: the caller is not a service of the run; its tokens are counted
            separately.
        with_routing: finished samples include their experts, if the engine records them.
        affinity: names the conversation of the prompt and of later prompts that continue it; if
            empty, nothing is kept for it.
        with_prompt_logprobs: one chunk includes the logprobs of the prompt, unless all samples are
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
        """Return a watch for a sample, if strings can end it."""
        if not self.sampling.stop or self.decode is None:
            return None
        return StopStringWatch(self.sampling.stop, self.decode)


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunk:
    """New tokens of one sample, all from one version.

    `finish_reason` is set on a sample's last chunk (which may hold no tokens). That chunk may have
    the `routing` of the whole sample; see `sluice.types.Turn`. If a request asks for
    `prompt_logprobs`, one chunk has them, with or without tokens.
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
    """Counts of sent and unsent tokens for callers of one kind.

    Attributes:
        sent: tokens sent to callers.
        unsent: sampled tokens of calls that ended before these were sent.
    """

    sent: int = 0
    unsent: int = 0


@dataclass(slots=True, eq=False)
class RequestTokens:
    """The sent and the unsent tokens of all requests of an engine.

    Used from the event loop only. Only `generation.GenerationRunner` counts: tokens when it sends
    them, and a call's unsent tokens when the call ends.

    Attributes:
        services: tokens for the run's services.
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
        slots_may_wait: a sample with a slot may still wait for space in the KV cache.
        kv_tokens: most tokens in the KV cache; 0 if unknown or enough for all slots.
    """

    slots: int
    version: int | None
    weight_digest: str
    slots_may_wait: bool = False
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A complete version in staging memory; `parts` holds the digest of each part."""

    version: int
    digest: str
    received_bytes: int
    seconds: float
    parts: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """The engine of a replica."""

    @property
    def accounting(self) -> RequestTokens:
        """Counts of sent and unsent tokens, written by the code that sends them."""
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
        """The weights that each worker takes; empty if each takes all."""
        ...

    async def start(self) -> None:
        """Build the model, with the weights of its files or without weights.

        Raises:
            CheckpointError: a file of the weights to serve is missing or damaged.
            ConfigError: the path holds no model.
        """
        ...

    async def stop(self) -> None:
        """Abort running samples and free everything. Idempotent."""
        ...

    async def check_alive(self) -> EngineLoad:
        """Get an answer from the loop that computes tokens; a hung engine does not answer."""
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
        """Generate the samples; yield the chunks since the last yield.

        Without `every_token` a sample's tokens arrive in few chunks, at the latest when it
        finishes; `partial_interval_s` also yields chunks of unfinished samples about that often.
        Closing the iterator, or cancelling its consumer, aborts the samples and frees their slots
        before the next decode step. The yielded part is complete up to its last token, and can be
        continued (`GenerationRequest.partials`); the rest is lost. At the end `request.tokens`
        counts all sampled tokens.

        Raises:
            InvalidRequestError: prompt and response exceed `max_model_len`, or the samples exceed
                the capacity of an idle engine.
            NotReadyError: the engine has no weights yet.
            ExhaustedError: too many samples are waiting.
            EngineError: the engine broke.
        """
        ...

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join an epoch's transfer group, leaving any earlier one; return the plan's digest."""
        ...

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive a version into staging memory while generation continues."""
        ...

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swap the staged version in between two decode steps. Idempotent.

        Returns:
            the seconds without a token; 0 if the version served already.

        Raises:
            WeightSyncError: nothing is staged under that version, or its digest is another.
        """
        ...

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Discard the staged weights and leave the group. Idempotent."""
        ...

    async def sleep(self) -> bool:
        """Free device memory and stop sampling until the next `join_group` or `stage`.

        The weights stay, and samples continue afterwards. Idempotent. Until then `commit` raises
        NotReadyError.

        Returns:
            whether it sleeps; an engine that cannot does nothing.
        """
        ...


# Limited, since every slot holds as many as the longest list of any request.
MAX_STOP_TOKEN_IDS = 64


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request whose values are valid but exceed the engine's limits.

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
    """Refuse a request whose samples do not fit into an engine with `under_way` open samples.

    Args:
        under_way: samples that run or wait.
        slots: samples that run at once.
        max_queued: samples that may wait for a slot.

    Raises:
        ExhaustedError: they do not fit now.
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
