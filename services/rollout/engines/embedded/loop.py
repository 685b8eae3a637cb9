"""The engine's core: groups in, one decode step at a time, chunks of tokens out.

Synchronous and without threads. A sample enters with the state of all its tokens but the last,
which the next decode step feeds. So each of its tokens, the first included, comes from a decode
step, and is sampled by the weights that serve at that moment.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.rollout.engines.causal_lm import CausalLM
from services.rollout.engines.embedded.batch_invariance import DecodeShapes
from services.rollout.engines.embedded.decoder import (
    CachedPrefix,
    Decoder,
    PrefilledPrompts,
    TokenRow,
)
from services.rollout.engines.embedded.kv_cache import PrefixCache
from services.rollout.engines.embedded.routing import RoutedDecoder
from services.rollout.engines.embedded.rows import EmbeddedRun, RowTable, RunningSample
from services.rollout.engines.protocol import SampleChunk
from services.rollout.engines.sampling import (
    SamplingPlan,
    plan_sampling,
    prompt_logprobs,
    sample_keys,
    sample_tokens,
)
from services.rollout.engines.settings import EngineSettings
from services.rollout.engines.weight_inbox import LiveWeights
from sluice.types import FinishReason, PromptLogprobs, RoutedExperts
from sluice.vision.image_prompts import ImagePrompt

_REFILL_SHARE = 16
_PREFILL_TOKENS = 8192

_Prefilled = tuple[PrefilledPrompts, list[int]]
"""Prompts that were prefilled together, and their indexes among the given prompts."""


@dataclass(frozen=True, slots=True)
class EmbeddedEngineSettings(EngineSettings):
    """Settings of one `EmbeddedEngine`.

    Attributes:
        batch_invariant: a sample's tokens and logprobs do not depend on other rows, to the bit.
        keeps_prefixes: an ended sample's keys and values serve the next turn of its conversation.
            Not with `batch_invariant`: a kept prefix differs from a computed one in the last bits.
        with_routing: keep the experts of each token for requests that ask for them.
    """

    batch_invariant: bool = False
    keeps_prefixes: bool = True
    with_routing: bool = False

    @property
    def kept_tokens(self) -> int:
        """Most tokens of kept prefixes: as many as the slots hold."""
        is_caching = self.keeps_prefixes and not self.batch_invariant
        return self.slots * self.max_model_len if is_caching else 0


@dataclass(slots=True, eq=False)
class PrefillUnit:
    """Waiting samples that continue the same tokens, so that one prefill serves them all.

    Attributes:
        tokens: the prompt, and earlier tokens of a sample that is continued.
        samples: the samples that still wait.
        run: their request.
        prefilled: location of the state of ``tokens[:-1]``, once computed.
    """

    tokens: TokenRow
    samples: deque[RunningSample]
    run: EmbeddedRun
    prefilled: tuple[PrefilledPrompts, int] | None = None


Admitted = tuple[PrefillUnit, tuple[RunningSample, ...]]
"""A unit and those of its samples that enter now."""


@dataclass(slots=True, eq=False)
class PrefillQueue:
    """Waiting prefill units by priority, then in order of arrival.

    The samples of a unit share one prefill. If slots run out in the middle of a unit, its prefilled
    prompt is kept for the samples that follow.
    """

    slots: int
    _units: deque[PrefillUnit] = field(default_factory=deque)
    waiting: int = 0

    def append(self, unit: PrefillUnit) -> None:
        """Queue a unit with at least one sample."""
        place = len(self._units)
        priority = unit.run.request.priority
        while place and self._units[place - 1].run.request.priority < priority:
            place -= 1
        self._units.insert(place, unit)
        self.waiting += len(unit.samples)

    def admit(self, free: int) -> list[Admitted]:
        """Return the samples that enter `free` slots.

        While others run, at least a sixteenth of all slots is refilled at a time: a prefill of one
        unit costs about as much as one of several.
        """
        # Few waiting samples need not wait for so many free slots.
        if free < min(self.waiting, max(1, self.slots // _REFILL_SHARE)):
            return []
        admissions = []
        while free > 0 and self._units:
            unit = self._units[0]
            count = min(free, len(unit.samples))
            admissions.append((unit, tuple(unit.samples.popleft() for _ in range(count))))
            free -= count
            self.waiting -= count
            if not unit.samples:
                self._units.popleft()
        return admissions

    def remove(self, unwanted: Callable[[RunningSample], bool]) -> list[RunningSample]:
        """Remove the samples for which `unwanted` is true."""
        removed: list[RunningSample] = []
        for unit in self._units:
            removed.extend(sample for sample in unit.samples if unwanted(sample))
            unit.samples = deque(sample for sample in unit.samples if not unwanted(sample))
        self._units = deque(unit for unit in self._units if unit.samples)
        self.waiting -= len(removed)
        return removed

    def forget_prefilled(self) -> None:
        """Drop prefilled states of waiting units, since the weights have changed."""
        for unit in self._units:
            unit.prefilled = None


def prefill_batches(lengths: list[int], token_budget: int) -> Iterator[list[int]]:
    """Yield indexes of prompts to prefill together, of similar length and within the budget.

    The budget counts tokens with padding; 0 puts each prompt into a separate batch.
    """
    order = np.argsort(lengths, kind="stable")
    batch: list[int] = []
    for index in order.tolist():
        if batch and (len(batch) + 1) * lengths[index] > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class GenerationLoop:
    """Generation with one model.

    Attributes:
        version: the policy version that serves; ``None`` before the first weights.
        digest: the digest of the weights.
        generated_tokens: sampled since the start.
        prompt_tokens: tokens of prompts that entered since the start, counted once for samples that
            share a prefill.
        reused_tokens: those of `prompt_tokens` that an earlier turn had computed.
        runs: requests with samples that have not ended.
        weights: the model's.
        device: of the model.

    Args:
        settings: of the engine.
        invariant_shapes: decode only in these shapes, and prefill each prompt alone.
    """

    def __init__(
        self,
        language_model: CausalLM,
        decoder: Decoder,
        settings: EmbeddedEngineSettings,
        invariant_shapes: DecodeShapes | None,
    ) -> None:
        self._layout = language_model.layout
        self.weights = LiveWeights(language_model)
        self._decoder = decoder
        self.device = language_model.model.device
        self._settings = settings
        self._shapes = invariant_shapes
        self._prefill_tokens = _PREFILL_TOKENS if invariant_shapes is None else 0
        self._table = RowTable(settings.slots, settings.max_model_len)
        self._queue = PrefillQueue(settings.slots)
        self._prefix_cache = PrefixCache(settings.kept_tokens)
        self._plan = SamplingPlan()
        self._next_due = math.inf
        self.version: int | None = None
        self.digest = ""
        self.generated_tokens = 0
        self.prompt_tokens = self.reused_tokens = 0
        self.runs: set[EmbeddedRun] = set()

    @property
    def slots(self) -> int:
        """Samples that can be generated at once."""
        return self._table.slots

    @property
    def slots_busy(self) -> int:
        """Samples that are being generated."""
        return self._table.busy

    @property
    def queued(self) -> int:
        """Samples that wait for a slot."""
        return self._queue.waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._table.busy > 0 or self._queue.waiting > 0

    def submit(self, run: EmbeddedRun) -> None:
        """Queue a request's samples; end samples that are complete already."""
        self.runs.add(run)
        request = run.request
        prompt = request.prompt_token_ids.astype(np.int64)
        partials = {partial.sample_index: partial for partial in request.partials}
        unfinished = deque[RunningSample]()
        keys = sample_keys(request.sampling.seed, request.sample_indexes)
        for index, key in zip(request.sample_indexes, keys, strict=True):
            partial = partials.get(index)
            sampled = prompt[:0] if partial is None else partial.token_ids.astype(np.int64)
            sample = self._sample(run, index, key, np.concatenate((prompt, sampled)))
            # Samples without earlier tokens share the prompt's prefill; others have their own.
            if not sampled.size:
                unfinished.append(sample)
            elif (reason := _finish_reason(sample, sampled)) is not None:
                self._deliver(sample, reason)
            else:
                self._queue.append(PrefillUnit(sample.tokens, deque((sample,)), run))
        if unfinished:
            self._queue.append(PrefillUnit(prompt, unfinished, run))

    def _sample(
        self, run: EmbeddedRun, index: int, key: np.uint64, tokens: TokenRow
    ) -> RunningSample:
        sampling, prompt = run.request.sampling, run.request.prompt_token_ids
        eos = () if sampling.ignore_eos else self._layout.eos_token_ids
        return RunningSample(
            owner=run,
            sample_index=index,
            tokens=tokens,
            prompt_length=len(prompt),
            length_limit=min(len(prompt) + sampling.max_tokens, self._settings.max_model_len),
            stop_ids=tuple({*eos, *sampling.stop_token_ids}),
            key=key,
            watch=run.request.watch(),
        )

    def cancel(self, run: EmbeddedRun) -> None:
        """Drop a request's samples, free their rows, and end its stream."""
        self._queue.remove(lambda sample: sample.owner is run)
        for row in self._table.occupied():
            sample = self._table.samples[row]
            if sample is not None and sample.owner is run:
                run.sampled += self._table.undelivered(row)
                self._table.leave(row)
        self._end(run)

    def abort_all(self) -> None:
        """End every sample with the tokens it has."""
        for sample in self._queue.remove(lambda _: True):
            self._deliver(sample, FinishReason.ABORTED)
        for row in self._table.occupied():
            self._finish(row, FinishReason.ABORTED)

    def swap(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str) -> None:
        """Take new weights between two steps.

        Tokens that were not handed out yet go out first, under the version that sampled them.

        Raises:
            WeightSyncError: the tensors do not fit the model; the old weights stay.

        After any other error the weights are a mixture, and the loop must end.
        """
        self.weights.check(tensors)
        # A chunk has one version: tokens of the old weights must leave before the new ones sample.
        for row in self._table.occupied():
            self._hand_out(row)
        self.weights.take(tensors)
        with torch.inference_mode():
            self._decoder.refresh()
            self._queue.forget_prefilled()
            if self._settings.recompute_kv:
                self._prefix_cache.clear()
                self._recompute()
        self.version, self.digest = version, digest

    def _recompute(self) -> None:
        rows = self._table.occupied()
        # All tokens but the newest, which the next decode step feeds.
        prefixes = [self._table.history[row, : self._table.position[row]] for row in rows]
        # A row with one token has no state: the next decode step feeds that token.
        nonempty = [index for index, prefix in enumerate(prefixes) if prefix.size]
        images = [self._table.images(rows[index]) for index in nonempty]
        for prefilled, members in self._prefill([prefixes[index] for index in nonempty], images):
            targets = np.array([rows[nonempty[member]] for member in members], dtype=np.int64)
            self._decoder.insert(prefilled, np.arange(len(members)), targets)

    def _prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None]
    ) -> list[_Prefilled]:
        """Return prefilled batches, each with the indexes of its prompts."""
        prefill = self._decoder.prefill
        return self._prefill_in_batches(
            prompts, lambda m: prefill([prompts[i] for i in m], [images[i] for i in m])
        )

    def _prefill_in_batches(
        self, prompts: Sequence[TokenRow], compute: Callable[[list[int]], PrefilledPrompts]
    ) -> list[_Prefilled]:
        batches = prefill_batches([len(prompt) for prompt in prompts], self._prefill_tokens)
        return [(compute(members), members) for members in batches]

    def step(self) -> None:
        """Fill free slots and sample one token for every running sample."""
        with torch.inference_mode():
            # New samples fill holes first; the last rows move into those that are left, so that the
            # decode step runs over the first rows only.
            self._admit()
            sources, targets = self._table.close_holes()
            if sources.size:
                length = int(self._table.position[targets].max()) + 1
                self._decoder.move(sources, targets, length)
            if self._table.rows:
                self._sample_tokens()

    def _admit(self) -> None:
        admissions = self._queue.admit(self._table.free) if self._queue.waiting else []
        self._score_prompts(admissions)
        # A prompt of one token has no state before its last token.
        units = (unit for unit, _ in admissions)
        units_to_prefill = [
            unit for unit in units if unit.prefilled is None and len(unit.tokens) > 1
        ]
        self._prefill_units(units_to_prefill)
        self._enter(admissions)

    def _score_prompts(self, admissions: Sequence[Admitted]) -> None:
        """Deliver the logprobs of prompts, and keep the states that come with them."""
        for unit, (sample, *_) in admissions:
            if sample.owner.owes_prompt:
                sample.owner.owes_prompt = False
                scored = self._score(unit, sample.prompt_length)
                self._deliver(sample, None, scored=scored)

    def _score(self, unit: PrefillUnit, prompt_length: int) -> PromptLogprobs:
        if prompt_length == 1:
            no_logprobs = np.empty(0, np.float32)
            return PromptLogprobs(no_logprobs, np.empty(0, np.uint32), no_logprobs)
        prefilled, logits = self._decoder.score(unit.tokens[:-1])
        unit.prefilled = (prefilled, 0)
        self.prompt_tokens += len(unit.tokens) - 1
        # A continued sample's tokens follow the prompt.
        return prompt_logprobs(logits[: prompt_length - 1], unit.tokens[1:prompt_length])

    def _prefill_units(self, units: Sequence[PrefillUnit]) -> None:
        """Compute the states of units, each from its longest kept prefix."""
        without_prefix: list[PrefillUnit] = []
        continued: list[tuple[PrefillUnit, CachedPrefix]] = []
        for unit in units:
            self.prompt_tokens += len(unit.tokens) - 1
            # Equal image tokens do not imply equal images.
            name = "" if unit.run.images is not None else unit.run.request.affinity
            prefix = self._prefix_cache.take(name, unit.tokens[:-1])
            if prefix is None:
                without_prefix.append(unit)
            else:
                continued.append((unit, prefix))
        tokens, images = (
            [unit.tokens[:-1] for unit in without_prefix],
            [unit.run.images for unit in without_prefix],
        )
        _assign_prefilled(self._prefill(tokens, images), without_prefix)
        self.reused_tokens += sum(len(prefix.tokens) for _, prefix in continued)
        longer, extend = [unit.tokens[:-1] for unit, _ in continued], self._decoder.extend
        extended = self._prefill_in_batches(
            longer, lambda m: extend([continued[i][1] for i in m], [longer[i] for i in m])
        )
        _assign_prefilled(extended, [unit for unit, _ in continued])

    def _enter(self, admissions: Sequence[Admitted]) -> None:
        samples = [
            (sample, unit.prefilled) for unit, unit_samples in admissions for sample in unit_samples
        ]
        if not samples:
            return
        rows = self._table.enter([sample for sample, _ in samples])
        self._plan_partials({sample.owner for sample, _ in samples})
        # One insert for each prefill batch, not for each sample: copies cost calls.
        inserts: dict[PrefilledPrompts, list[tuple[int, int]]] = {}
        for row, (_, state) in zip(rows.tolist(), samples, strict=True):
            if state is not None:
                inserts.setdefault(state[0], []).append((state[1], row))
        for prefilled, pairs in inserts.items():
            prompts, targets = np.array(pairs, dtype=np.int64).T
            self._decoder.insert(prefilled, prompts.copy(), targets.copy())

    def _sample_tokens(self) -> None:
        table = self._table
        # The plan stays on the device until rows change: building it takes several transfers.
        if table.changed:
            rows = table.rows
            self._plan = plan_sampling(
                table.temperature[:rows],
                table.top_p[:rows],
                table.top_k[:rows],
                self._layout.vocab_size,
                self.device,
            )
            table.changed = False
        logits = self._decoder.decode(table.batch(self._shapes))[: table.rows]
        uniform = torch.from_numpy(table.uniforms()).to(self.device)
        tokens, logprobs = sample_tokens(logits, self._plan, uniform)
        stopped, full = table.record(tokens.cpu().numpy(), logprobs.cpu().numpy())
        self.generated_tokens += table.rows
        # If both hold, stop wins over the limit.
        for row in np.flatnonzero(stopped | full).tolist():
            self._finish(row, FinishReason.STOP if stopped[row] else FinishReason.LENGTH)
        for row in table.streaming_rows():
            self._hand_out(row)
        now_s = time.perf_counter()
        if now_s >= self._next_due:
            self._hand_out_partials(now_s)

    def _plan_partials(self, entered: Iterable[EmbeddedRun]) -> None:
        """Schedule the hand-out of unfinished samples' tokens for requests whose samples enter."""
        for run in entered:
            if run.pace.interval_s is not None and math.isinf(run.due):
                run.due = time.perf_counter() + run.pace.interval_s
            self._next_due = min(self._next_due, run.due)

    def _hand_out_partials(self, now_s: float) -> None:
        """Hand out the tokens of unfinished samples whose request is due."""
        due = {run for run in self.runs if run.due <= now_s}
        for row in self._table.occupied():
            sample = self._table.samples[row]
            if sample is not None and sample.owner in due:
                self._hand_out(row)
        for run in due:
            run.due = now_s + (run.pace.interval_s or math.inf)
        self._next_due = min((run.due for run in self.runs), default=math.inf)

    def _finish(self, row: int, reason: FinishReason) -> None:
        sample = self._table.samples[row]
        assert sample is not None
        tokens, logprobs = self._table.take(row)
        routing = None
        # An aborted sample is computed again where it continues.
        if sample.owner.request.with_routing and reason is not FinishReason.ABORTED:
            routing = self._routing(row)
        if sample.owner.request.affinity and reason is not FinishReason.ABORTED:
            self._keep_prefix(row, sample)
        self._table.leave(row)
        self._deliver(sample, reason, tokens, logprobs, routing)

    def _keep_prefix(self, row: int, sample: RunningSample) -> None:
        """Keep the state of an ended sample for the next turn of its conversation."""
        length = int(self._table.position[row])
        if not 0 < length <= self._prefix_cache.max_tokens or sample.owner.images is not None:
            return
        prefix = self._decoder.keep(row, self._table.history[row, :length].copy())
        if prefix is not None:
            request = sample.owner.request
            name = request.affinity
            if len(request.sample_indexes) > 1:
                name = f"{name}.{sample.sample_index}"
            self._prefix_cache.put(name, prefix)

    def _routing(self, row: int) -> RoutedExperts | None:
        """Return the experts of all tokens of a row but the newest."""
        if not isinstance(self._decoder, RoutedDecoder):
            return None
        return self._decoder.routing(row, int(self._table.position[row]))

    def _hand_out(self, row: int) -> None:
        sample = self._table.samples[row]
        assert sample is not None
        tokens, logprobs = self._table.take(row)
        if tokens.size:
            self._deliver(sample, None, tokens, logprobs)

    def _deliver(
        self,
        sample: RunningSample,
        reason: FinishReason | None,
        tokens: np.ndarray | None = None,
        logprobs: np.ndarray | None = None,
        routing: RoutedExperts | None = None,
        scored: PromptLogprobs | None = None,
    ) -> None:
        assert self.version is not None
        run = sample.owner
        chunk = SampleChunk(
            sample.sample_index,
            np.empty(0, np.uint32) if tokens is None else tokens,
            np.empty(0, np.float32) if logprobs is None else logprobs,
            self.version,
            reason,
            routing,
            scored,
        )
        run.sampled += int(chunk.token_ids.size)
        run.stream.post([chunk])
        if reason is not None:
            run.remaining -= 1
            if run.remaining == 0:
                self._end(run)

    def _end(self, run: EmbeddedRun) -> None:
        self.runs.discard(run)
        run.stream.end(None)


def _assign_prefilled(batches: Sequence[_Prefilled], units: Sequence[PrefillUnit]) -> None:
    """Give units the states that were computed for them together."""
    for prefilled, members in batches:
        for place, member in enumerate(members):
            units[member].prefilled = (prefilled, place)


def _finish_reason(sample: RunningSample, sampled: TokenRow) -> FinishReason | None:
    """Return why a continued sample is complete already; its watch sees the earlier tokens."""
    if int(sample.tokens[-1]) in sample.stop_ids:
        return FinishReason.STOP
    if sample.watch is not None and sample.watch.push(sampled.tolist()) is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sample.tokens) >= sample.length_limit else None
