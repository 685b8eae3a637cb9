"""The values that flow through the loop, one frozen type per stage.

``Prompt -> Rollout / RolloutGroup -> GradedGroup -> TrainBatch``: a value exists only when all of
its fields exist. Arrays are NumPy, one-dimensional, and are never written to after construction.

Shapes: ``[tokens]`` counts response tokens unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from sluice.weight_share import Holding, WeightShare, WorkerPlace

TokenIds = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]
RoutedExperts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""Numbers of the experts that passes chose, [tokens, layers with experts, experts per token]."""

_MAX_BYTE_EXPERTS = 256

IMAGE_MARK = "<image>"
"""Marks the place of an image in a message's text."""

LARGEST_NUMBER = (2 - 2**-23) * 2.0**127
"""Of float32, which advantages are computed in: rewards are no larger."""

_DIGEST_BYTES = 16


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the dtype of `RoutedExperts` of a model with so many experts in a layer."""
    return np.dtype(np.uint8) if num_experts <= _MAX_BYTE_EXPERTS else np.dtype(np.uint16)


_TaggedFormat = Literal["hermes", "qwen3_coder", "llama3_json", "glm", "kimi", "minimax", "seed"]
ToolFormat = Literal[_TaggedFormat, "deepseek_v4", "gemma4", "gpt-oss", "plain"]
"""How policies write calls of tools; ``plain``: they write none."""
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is the text of a JSON object, as the policy sampled it."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call; `parameters` is a JSON Schema, as text; empty: none."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat prompt; `role` is ``system``, ``user``, ``assistant`` or ``tool``.

    An assistant's turn may have `tool_calls`, and `reasoning` apart from its content. A tool's turn
    answers the call `tool_call_id`; `is_error`: it says why the call failed, for records.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a finished response says.

    `content` has neither thoughts nor calls. `tool_error`: what is wrong with a call that cannot be
    read; then there are no `tool_calls`, and the content has their text.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_error: str = ""


class PromptOrigin(StrEnum):
    """The origin of a prompt."""

    DATASET = "dataset"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task to sample responses for, as read from a data set or submitted by a client.

    Attributes:
        sequence: its number in the order of issue, 0-based, unique in one run of the reward
            service. Prompts wait, get replicas and, among groups of one age, are trained in this
            order, through all attempts.
        data_source: chooses the scorer; not a source of `sluice.sources`.
        position: 0-based, in the stream of the rows of the data set, epoch after epoch; ``None``
            for a client's prompt. The sampling seed depends on it, a client's on `sequence`.
        place: the file and row it was read from, for messages; empty for a client's.
        images: encoded files (PNG, JPEG or WebP), one for each ``<image>`` in the messages, in
            their order.
        source: the one of `sluice.sources` that it belongs to, whose rows `position` counts; empty
            in a run without them.
        truth_is_json: the row holds `ground_truth` as another value than text, and it is the JSON
            of that value.
    """

    prompt_id: str
    sequence: int
    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    origin: PromptOrigin
    position: int | None
    extra_info: Mapping[str, object] = field(default_factory=dict)
    place: str = ""
    images: tuple[bytes, ...] = ()
    source: str = ""
    truth_is_json: bool = False

    @property
    def truth(self) -> object:
        """The ground truth as the row holds it."""
        return json.loads(self.ground_truth) if self.truth_is_json else self.ground_truth


class FinishReason(StrEnum):
    """Why a sample ended. ``ABORTED`` samples are partial and never graded."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens ``[start, end)``, sampled by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """How to sample tokens. The behavior logprob is taken of the distribution these define.

    `top_p` = 1 and `top_k` = -1 mean off; `temperature` = 0 is greedy (logprobs are then computed
    at temperature 1). `seed` fixes sample *i*'s randomness independently of batching. A sample ends
    with the token that completes one of the strings in `stop`; its text ends before.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


def seed_of(text: str) -> int:
    """Return 63 bits that depend on a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """How probable the tokens of a prompt are after the first, each given the tokens before it.

    Logprobs are natural logs of the model's distribution at temperature 1.

    Raises:
        ValueError: lengths differ.
    """

    logprobs: Logprobs  # [prompt tokens - 1]
    top_token_ids: TokenIds  # [prompt tokens - 1], the most probable token at each place
    top_logprobs: Logprobs  # [prompt tokens - 1]

    def __post_init__(self) -> None:
        sizes = (self.logprobs.size, self.top_token_ids.size, self.top_logprobs.size)
        if len(set(sizes)) > 1:
            raise ValueError(f"{sizes} logprobs, most probable tokens and their logprobs")


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt:
    """The logprobs of a prompt's tokens, and the texts of the tokens.

    Attributes:
        texts: what each token of the prompt completes; together the prompt's text.
        top_texts: of each of the most probable tokens.
    """

    logprobs: PromptLogprobs
    texts: tuple[str, ...]
    top_texts: tuple[str, ...]


# No vocabulary has this token, and a logprob that is no number spoils a loss visibly.
_ABSENT_TOKEN = np.array([0xFFFFFFFF], dtype=np.uint32)
_ABSENT_LOGPROB = np.array([np.nan], dtype=np.float32)
_ABSENT_EXPERT = np.zeros((1, 1, 1), dtype=np.uint8)
for _one in (_ABSENT_TOKEN, _ABSENT_LOGPROB, _ABSENT_EXPERT):
    _one.flags.writeable = False


def absent_tokens(size: int) -> TokenIds:
    """Return the place of so many tokens that are elsewhere; it takes no memory."""
    # As `np.broadcast_to`, which takes ten times as long.
    return np.ndarray((size,), np.uint32, _ABSENT_TOKEN, strides=(0,))


def absent_logprobs(size: int) -> Logprobs:
    """Return the place of so many logprobs that are elsewhere; it takes no memory."""
    return np.ndarray((size,), np.float32, _ABSENT_LOGPROB, strides=(0,))


def is_absent(values: TokenIds | RoutedExperts) -> bool:
    """Return whether these tokens, or experts, are elsewhere; no tokens never are."""
    return any(np.may_share_memory(values, mark) for mark in (_ABSENT_TOKEN, _ABSENT_EXPERT))


_NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call of a sample: the tokens that the policy sampled in it, and what it read before
    them that the turn it continues had not.

    The sequence that the policy read is the path to the turn: the group's prompt, then `context`
    and `token_ids` of each turn from the root, then this one's `context`. A root with
    `is_new_root` begins with its `context` instead of the group's prompt, such as after a template
    or an agent rewrote the history. Turns that continue the same turn are branches.

    `routing` has the engine's experts, if it gave them, of the prompt's tokens and all of these but
    the last, which no pass has read. Where a token was computed again, passes of the replica that
    ended the sample count; within it, the last (torch engine) or the first (vLLM).

    Raises:
        ValueError: lengths differ, or the version spans do not tile ``[0, tokens)`` in order.
    """

    token_ids: TokenIds  # [tokens]
    behavior_logprobs: Logprobs  # [tokens], natural log
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str
    routing: RoutedExperts | None = None
    answer: Answer | None = None  # only where the request asks to read it
    parent: int | None = None  # index of the turn that it continues; None: it is a root
    context: TokenIds = field(default_factory=lambda: _NO_TOKENS)  # [read tokens]
    is_new_root: bool = False
    reward: float | None = None  # of this turn, where the environment gives any
    observed: tuple[ChatMessage, ...] = ()  # the messages that `context` renders, for records
    seconds: Mapping[str, float] = field(default_factory=dict)  # spent, by part, for records

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.behavior_logprobs.shape or self.token_ids.ndim != 1:
            raise ValueError(
                f"{self.token_ids.shape} token ids against {self.behavior_logprobs.shape} behavior "
                "logprobs"
            )
        cursor = 0
        for span in self.version_spans:
            if span.start != cursor or span.end <= span.start:
                raise ValueError(f"version spans leave gaps: {span}")
            cursor = span.end
        if cursor != self.token_ids.size:
            raise ValueError(f"version spans cover {cursor} of {self.token_ids.size} tokens")
        # A prompt has a token at least.
        if self.routing is not None and len(self.routing) < max(1, self.token_ids.size):
            raise ValueError(
                f"experts of {len(self.routing)} tokens, prompt included, for "
                f"{self.token_ids.size} tokens of the response"
            )


class EpisodeEnd(StrEnum):
    """Why a sample with an environment ended, where it did not fail."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    INVALID_CALLS = "invalid_calls"


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sample: an episode of one or more turns, in the order of their calls.

    A sample without an environment has one turn. The properties with ``[tokens]`` join the sampled
    tokens of all turns, in order; what the policy only read is in `Turn.context`.

    Args:
        sample_index: its index within the group.
        turns: see `Turn`; a turn continues an earlier one, or is a root.
        end: why its episode ended; ``None``: it has no environment, or failed.
        outcome: its grade or failure, where the environment decides; ``None``: scorers do.
        whole_text: of all turns, with what the policy read between them, where scorers grade that;
            ``None``: they grade the text of the last turn.

    Raises:
        ValueError: no turns; a turn continues no earlier one; or several turns with routing.
    """

    sample_index: int
    turns: tuple[Turn, ...]
    end: EpisodeEnd | None = None
    outcome: Scored | Failed | None = None
    whole_text: str | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"sample {self.sample_index}: no turns")
        for number, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < number:
                raise ValueError(
                    f"sample {self.sample_index}: turn {number} continues turn {turn.parent}, "
                    "which is not before it"
                )
            if turn.routing is not None and len(self.turns) > 1:
                raise ValueError(f"sample {self.sample_index}: experts of several turns")

    @classmethod
    def of_one_turn(
        cls,
        sample_index: int,
        token_ids: TokenIds,
        behavior_logprobs: Logprobs,
        version_spans: tuple[VersionSpan, ...],
        finish_reason: FinishReason,
        text: str,
        routing: RoutedExperts | None = None,
        answer: Answer | None = None,
    ) -> Rollout:
        """Return a sample of one turn; see `Turn` for the arguments.

        Raises:
            ValueError: names the sample; see `Turn`.
        """
        try:
            turn = Turn(
                token_ids, behavior_logprobs, version_spans, finish_reason, text, routing, answer
            )
        except ValueError as error:
            raise ValueError(f"rollout {sample_index}: {error}") from error
        return cls(sample_index, (turn,))

    @classmethod
    def absent(
        cls,
        sample_index: int,
        num_tokens: int,
        version_spans: tuple[VersionSpan, ...],
        finish_reason: FinishReason,
        *,
        has_routing: bool,
    ) -> Rollout:
        """Return a sample whose tokens, logprobs, experts and text are elsewhere.

        Raises:
            ValueError: names the sample; see `Turn`.
        """
        routing = None
        if has_routing:
            routing = np.broadcast_to(_ABSENT_EXPERT, (max(1, num_tokens), 1, 1))
        return cls.of_one_turn(
            sample_index,
            absent_tokens(num_tokens),
            absent_logprobs(num_tokens),
            version_spans,
            finish_reason,
            "",
            routing,
        )

    @property
    def token_ids(self) -> TokenIds:
        """Sampled tokens, ``[tokens]``."""
        if len(self.turns) == 1:
            return self.turns[0].token_ids
        if self._is_absent:
            return absent_tokens(self.num_tokens)
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def behavior_logprobs(self) -> Logprobs:
        """Their log probabilities when they were sampled, ``[tokens]``, natural log."""
        if len(self.turns) == 1:
            return self.turns[0].behavior_logprobs
        if self._is_absent:
            return absent_logprobs(self.num_tokens)
        return np.concatenate([turn.behavior_logprobs for turn in self.turns])

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The policy versions that sampled them; the spans of each turn follow those before."""
        if len(self.turns) == 1:
            return self.turns[0].version_spans
        spans, offset = list[VersionSpan](), 0
        for turn in self.turns:
            spans += [
                VersionSpan(span.version, offset + span.start, offset + span.end)
                for span in turn.version_spans
            ]
            offset += turn.token_ids.size
        return tuple(spans)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended."""
        return self.turns[-1].finish_reason

    @property
    def routing(self) -> RoutedExperts | None:
        """The engine's experts of a single turn; see `Turn`."""
        return self.turns[0].routing

    def with_routing(self, routing: RoutedExperts | None) -> Rollout:
        """Return the sample with the engine's experts.

        Raises:
            ValueError: names the sample; see `Turn`.
        """
        if routing is None and self.routing is None:
            return self
        (turn,) = self.turns
        try:
            return replace(self, turns=(replace(turn, routing=routing),))
        except ValueError as error:
            raise ValueError(f"rollout {self.sample_index}: {error}") from error

    @property
    def answer(self) -> Answer | None:
        """What the last turn says, where the request asks to read it."""
        return self.turns[-1].answer

    @property
    def text(self) -> str:
        """The text that scorers grade."""
        return self.turns[-1].text if self.whole_text is None else self.whole_text

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, stop tokens included."""
        if len(self.turns) == 1:
            return self.turns[0].token_ids.size
        return sum(turn.token_ids.size for turn in self.turns)

    @property
    def num_context_tokens(self) -> int:
        """Tokens that its turns read beyond the group's prompt and the turns before."""
        return sum(turn.context.size for turn in self.turns)

    @property
    def num_roots(self) -> int:
        """Turns that continue no other."""
        return sum(turn.parent is None for turn in self.turns)

    @property
    def is_plain(self) -> bool:
        """Whether it is one answer to the group's prompt, with nothing else to know of its turn."""
        turn = self.turns[0]
        has_more = turn.context.size or turn.is_new_root
        return len(self.turns) == 1 and not has_more and turn.reward is None

    @property
    def _is_absent(self) -> bool:
        return any(is_absent(turn.token_ids) for turn in self.turns)

    @property
    def versions(self) -> frozenset[int]:
        """The versions that sampled a token of any turn; none for an empty response."""
        return frozenset(span.version for turn in self.turns for span in turn.version_spans)

    @property
    def oldest_version(self) -> int | None:
        """The version that sampled the oldest token; ``None`` for an empty response."""
        return min(self.versions, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All n samples of one prompt, in order of `sample_index`."""

    prompt: Prompt
    prompt_token_ids: TokenIds  # [prompt tokens]
    rollouts: tuple[Rollout, ...]

    @property
    def num_response_tokens(self) -> int:
        """Sum of response lengths."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


class FailureKind(StrEnum):
    """Why a sample has no score. None of these ever becomes a number."""

    UNSCORABLE = "unscorable"
    SCORER_TIMEOUT = "scorer_timeout"
    SCORER_CRASH = "scorer_crash"
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"
    ENVIRONMENT = "environment"  # it is down, was killed, hung, or its episode had no time left
    AGENT = "agent"  # the program that worked on the sample failed, or its lease expired


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample's grade.

    `score` is the scorer's number; `reward` adds shaping (overlong penalty) and is what
    advantages are computed from; `metrics` are the scorer's further numbers (`acc`, ...).
    """

    score: float
    reward: float
    metrics: Mapping[str, float]
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample that could not be graded, with the reason.

    `frames` are the last ones of the scorer's exception, for the log; they are never sent.
    """

    kind: FailureKind
    detail: str
    frames: tuple[str, ...] = field(default=(), compare=False)


Outcome = Scored | Failed


@dataclass(frozen=True, slots=True, eq=False)
class GradedGroup:
    """A group with exactly one outcome per rollout.

    `greedy` is the graded group of one greedy response to the same prompt, where a baseline is
    asked for. It is no sample: the filter does not see it, and it is not trained on.
    """

    group: RolloutGroup
    outcomes: tuple[Outcome, ...]
    greedy: GradedGroup | None = None

    def __post_init__(self) -> None:
        if len(self.outcomes) != len(self.group.rollouts):
            raise ValueError(
                f"group {self.group.prompt.prompt_id}: {len(self.outcomes)} outcomes for "
                f"{len(self.group.rollouts)} rollouts"
            )

    @property
    def scored(self) -> tuple[Scored, ...]:
        """The outcomes that carry a number."""
        return tuple(o for o in self.outcomes if isinstance(o, Scored))

    @property
    def baseline_reward(self) -> float | None:
        """The greedy response's reward; ``None`` without such a response or without its score."""
        scored = self.greedy.scored if self.greedy else ()
        return scored[0].reward if scored else None

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token, the greedy response's included.

        Raises:
            ValueError: no sample holds a token.
        """
        rollouts = (*self.group.rollouts, *(self.greedy.group.rollouts if self.greedy else ()))
        versions = [v for rollout in rollouts if (v := rollout.oldest_version) is not None]
        if not versions:
            raise ValueError(f"group {self.group.prompt.prompt_id} holds no tokens")
        return min(versions)


class PromptEnd(StrEnum):
    """How an accepted prompt ended (invariant 1): exactly one of these, or it is pending.

    ``DROPPED_SURPLUS`` is a kept group beyond the batch, which only the strategy `rounds` discards.
    ``SKIPPED`` is a data-set prompt that got no samples, because its earlier attempts promise too
    little.
    """

    TRAINED = "trained"
    FILTERED_ALL_RIGHT = "filtered_all_right"
    FILTERED_ALL_WRONG = "filtered_all_wrong"
    FILTERED_UNIFORM = "filtered_uniform"
    DROPPED_STALE = "dropped_stale"
    DROPPED_FAILED = "dropped_failed"
    DROPPED_SURPLUS = "dropped_surplus"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """One prompt's samples as the optimizer sees them: every sample is scored.

    On a trainer rank, tokens of samples that other ranks train are absent (`is_absent`), and so is
    a prompt without a sample here. `prompt_routing` has experts of the prompt's tokens where the
    first sample with any is absent. `source` is the prompt's (`Prompt.source`).
    """

    prompt_id: str
    prompt_token_ids: TokenIds  # [prompt tokens]
    rollouts: tuple[Rollout, ...]
    scores: tuple[Scored, ...]
    data_source: str
    baseline_reward: float | None = None  # of the prompt's greedy response, if there is one
    images: tuple[bytes, ...] = ()  # encoded files, in the order of their tokens in the prompt
    traceparent: str = ""  # of the prompt's span; empty where it is not recorded
    prompt_routing: RoutedExperts | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The progress of the data-set stream.

    Every position below `low_water` ended; `ended_above` are positions >= `low_water` that ended
    too. Resuming issues all others. With several sources `sources` has the progress of each.
    """

    low_water: int
    ended_above: tuple[int, ...] = ()
    sources: Mapping[str, DataProgress] = field(default_factory=dict)

    def of(self, source: str) -> DataProgress:
        """Return the progress of one source; an empty name is that of a run without sources."""
        return self.sources.get(source, DataProgress(0)) if source else self


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """`train_batch_size` kept groups, leased to the trainer under `batch_id`."""

    batch_id: str
    policy_version: int
    groups: tuple[TrainGroup, ...]
    progress: DataProgress
    statistics: Mapping[str, float]  # counters and gauges of the interval since the last batch

    @property
    def num_routed(self) -> int:
        """Samples with the engine's experts."""
        return sum(
            rollout.routing is not None for group in self.groups for rollout in group.rollouts
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch name without ``torch.``) and shape of one weight on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferCertificates:
    """Certificates in PEM of a process that reaches, or serves, a rendezvous store by TLS.

    `authority` checks the other end's certificate; none: the system's authorities do. A member
    need not have a `certificate` and its `key`, a server must.
    `asks_certificate`: the server requires a certificate of members. `server_name`: the name that
    the server's certificate carries; none: the address that members connect to.
    """

    authority: bytes | None
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    asks_certificate: bool
    server_name: str | None


@dataclass(frozen=True, slots=True)
class TransferGroupSpec:
    """One epoch of a weight-transfer group: everything a member needs to join it.

    `rank` 0 is the sender. `bucket_bytes` bounds one collective; `timeout_s` bounds the
    formation and each collective. `store_key` is the epoch's secret, for the store at `host` and
    `port`; empty for a store that is open to all. `ranks` are the member's from `rank` on, one for
    each of its devices; if these are not all in group 0, `places` has each one's place.
    `holdings` are those of the trainer ranks that send, each in a group of its own with the member;
    none: one rank sends all weights. A place's group then counts classes of workers, each with as
    many groups as there are holdings.
    `certificates` are each process's own and never travel to another machine; none: no TLS.
    """

    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    bucket_bytes: int
    timeout_s: float
    tensors: tuple[TensorSpec, ...]
    plan_digest: str
    store_key: bytes = field(default=b"", repr=False)
    ranks: int = 1
    certificates: TransferCertificates | None = field(default=None, repr=False)
    group: int = 0
    places: tuple[WorkerPlace, ...] = ()
    holdings: tuple[Holding, ...] = field(default=(), repr=False)

    def of_worker(self, worker: int) -> TransferGroupSpec:
        """Return the spec of one of the member's workers, 0 to `ranks` - 1."""
        places = asdict(self.places[worker]) if self.places else {"rank": self.rank + worker}
        return replace(self, ranks=1, places=(), **places)

    def of_sender(self, number: int) -> TransferGroupSpec:
        """Return the spec of the group with one of the senders, for one worker."""
        senders = max(1, len(self.holdings))
        return replace(self, holdings=(), group=self.group * senders + number)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A rollout replica as the trainer knows it. `instance_id` is new at each process start.

    `ranks` are those it takes in a transfer group: one for each of its devices. `shares` are the
    weights of each; none: every rank takes all of them. `kv_tokens` is how many tokens its KV cache
    holds; 0: not known, or never fewer than its slots need.
    """

    name: str
    instance_id: str
    address: str
    slots: int
    ranks: int = 1
    shares: tuple[WeightShare, ...] = field(default=(), repr=False, compare=False)
    kv_tokens: int = 0


def layout_digest(tensors: Iterable[TensorSpec]) -> str:
    """Hex digest that two processes share exactly if their weights fit each other.

    The order counts, since it is the order on the wire.
    """
    layout = [[spec.name, spec.dtype, list(spec.shape)] for spec in tensors]
    return hashlib.blake2b(json.dumps(layout).encode(), digest_size=_DIGEST_BYTES).hexdigest()
