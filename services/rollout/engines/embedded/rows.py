"""The state of each running sample, in arrays with one entry per slot.

The rows in use are the first `rows`; freed ones among them are holes until they are filled or
closed. Everything done per step is done for all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.rollout.engines.embedded.batch_invariance import DecodeShapes
from services.rollout.engines.embedded.decoder import DecodeBatch, Rows
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sampling import uniforms
from services.rollout.engines.text import StopStringWatch
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.threaded_engine import EngineRun, FlushPolicy
from sluice.vision.image_prompts import ImagePrompt

_FIELDS = 6
_NO_TOKEN = -1


class EmbeddedRun(EngineRun):
    """A request in the loop.

    Attributes:
        images: the prompt's `ImagePrompt`, or ``None``.
        remaining: samples that have not ended.
        due: when tokens of unfinished samples are handed out next, in seconds of
            `time.perf_counter`: at the pace's interval from the first step on.
        owes_prompt: whether the logprobs of its prompt must still be computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pace: FlushPolicy,
        stream: ChunkStream,
        images: ImagePrompt | None = None,
    ) -> None:
        super().__init__(request, pace, stream, images)
        self.remaining = len(request.sample_indexes)
        self.due = math.inf
        self.owes_prompt = request.with_prompt_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class RunningSample:
    """One sample as it enters a row.

    Attributes:
        owner: the request of the sample.
        tokens: the prompt and earlier response tokens.
        prompt_length: tokens of `tokens` that are the prompt.
        length_limit: prompt plus response tokens at which it ends.
        stop_ids: tokens that end it.
        key: the key of its random stream.
        watch: looks for strings that end it; it has seen the earlier tokens.
    """

    owner: EmbeddedRun
    sample_index: int
    tokens: npt.NDArray[np.int64]
    prompt_length: int
    length_limit: int
    stop_ids: tuple[int, ...]
    key: np.uint64
    watch: StopStringWatch | None = None


class RowTable:
    """Rows of running samples.

    Attributes:
        rows: rows in use, holes included.
        history: [slots, max_model_len] int64, prompt and response tokens.
        logprobs: [slots, max_model_len] float32, behavior logprobs at the same places.
        position: [slots] int64, index of the newest token in `history`.
        delivered: [slots] int64, index of the first token in `history` that was not handed out.
        samples: per slot, ``None`` for holes and unused slots.
        changed: rows entered, left or moved since it was last reset.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.slots = slots
        self.rows = 0
        self.history = np.zeros((slots, max_model_len), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_model_len), dtype=np.float32)
        self._integers = np.zeros((_FIELDS, slots), dtype=np.int64)
        self.position, self._prompt_length, self._limit = self._integers[:3]
        self.top_k, self.delivered, self._shift = self._integers[3:]
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float64)
        # Filled when a sample enters: one call for all of its steps instead of one for each.
        self._uniforms = np.zeros((slots, max_model_len), dtype=np.float64)
        self._stop_ids = np.full((slots, 1), _NO_TOKEN, dtype=np.int64)
        self._streaming = np.zeros(slots, dtype=np.bool_)
        self._watched = np.zeros(slots, dtype=np.bool_)
        self._row_start = np.arange(slots, dtype=np.int64) * max_model_len
        self.samples: list[RunningSample | None] = [None] * slots
        self._holes: list[int] = []
        self.changed = True

    @property
    def busy(self) -> int:
        """Rows that hold a sample."""
        return self.rows - len(self._holes)

    @property
    def free(self) -> int:
        """Samples that can enter."""
        return self.slots - self.busy

    def occupied(self) -> list[int]:
        """Return the rows that hold a sample."""
        return [row for row in range(self.rows) if self.samples[row] is not None]

    def enter(self, samples: Sequence[RunningSample]) -> Rows:
        """Give each sample a row, holes first; at most `free` samples."""
        rows = []
        keys = np.array([sample.key for sample in samples], dtype=np.uint64)
        for sample in samples:
            # A hole needs no move of another row.
            if self._holes:
                row = self._holes.pop()
            else:
                row, self.rows = self.rows, self.rows + 1
            self._write(row, sample)
            rows.append(row)
        self.changed = True
        entered = np.array(rows, dtype=np.int64)
        self._draw_uniforms(entered, keys)
        return entered

    def _draw_uniforms(self, rows: Rows, keys: npt.NDArray[np.uint64]) -> None:
        """Keep the random number for the token after place p at place p."""
        start, end = int(self.position[rows].min()), int(self._limit[rows].max())
        places = np.arange(start, end)
        index = np.maximum(places + 1 - self._prompt_length[rows][:, None], 0)
        self._uniforms[rows, start:end] = uniforms(keys[:, None], index)

    def _write(self, row: int, sample: RunningSample) -> None:
        length = len(sample.tokens)
        self.history[row, :length] = sample.tokens
        self.position[row] = length - 1
        self.delivered[row] = length
        self._prompt_length[row] = sample.prompt_length
        self._limit[row] = sample.length_limit
        sampling, images = sample.owner.request.sampling, sample.owner.images
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.top_k[row] = sampling.top_p, sampling.top_k
        self._streaming[row] = sample.owner.pace.every_token
        self._watched[row] = sample.watch is not None
        self._shift[row] = 0 if images is None else images.positions.shift
        num_missing = len(sample.stop_ids) - self._stop_ids.shape[1]
        if num_missing > 0:  # the table is as wide as the longest list so far
            self._stop_ids = np.pad(
                self._stop_ids, ((0, 0), (0, num_missing)), constant_values=_NO_TOKEN
            )
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(sample.stop_ids)] = sample.stop_ids
        self.samples[row] = sample

    def leave(self, row: int) -> None:
        """Free a row."""
        self.samples[row] = None
        self._streaming[row] = self._watched[row] = False
        # The row keeps its arrays until the next step: only then are holes filled or closed.
        self._holes.append(row)
        self.changed = True

    def close_holes(self) -> tuple[Rows, Rows]:
        """Move the last rows into the holes; return (sources, targets) for the decoder."""
        used = self.busy
        targets = [row for row in self._holes if row < used]
        sources = [row for row in range(used, self.rows) if self.samples[row] is not None]
        self._holes.clear()
        self.rows = used
        source, target = np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)
        if sources:
            # Both lists are as long: each hole below `used` gets one of the rows from `used` on.
            self._integers[:, target] = self._integers[:, source]
            for array in (
                self.history,
                self.logprobs,
                self.temperature,
                self.top_p,
                self._uniforms,
                self._stop_ids,
                self._streaming,
                self._watched,
            ):
                array[target] = array[source]
            for from_row, to_row in zip(sources, targets, strict=True):
                self.samples[to_row], self.samples[from_row] = self.samples[from_row], None
        return source, target

    def batch(self, shapes: DecodeShapes | None = None) -> DecodeBatch:
        """Return the next decode step of all rows, padded to `shapes`; there must be no holes.

        A padding row feeds token 0 at position 0 of an unused slot.
        """
        rows = width = self.rows
        length = int(self.position[:rows].max()) + 1
        if shapes is not None:
            width, length = shapes.padded_shape(rows, length)
        positions = np.zeros(width, dtype=np.int64)
        positions[:rows] = self.position[:rows]
        tokens = self.history.reshape(-1)[self._row_start[:width] + positions]
        shifts = np.zeros(width, dtype=np.int64)
        shifts[:rows] = self._shift[:rows]
        return DecodeBatch(tokens, positions, length, self.history[:width], shifts)

    def uniforms(self) -> npt.NDArray[np.float64]:
        """Return each row's random number for its next token."""
        rows = self.rows
        sampled: npt.NDArray[np.float64] = self._uniforms.reshape(-1)[
            self._row_start[:rows] + self.position[:rows]
        ]
        return sampled

    def record(
        self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Append one token per row; return which rows met a stop, and which their limit."""
        rows = self.rows
        self.position[:rows] += 1
        place = self._row_start[:rows] + self.position[:rows]
        self.history.reshape(-1)[place] = tokens
        self.logprobs.reshape(-1)[place] = logprobs
        # No token has the id that fills up the lists of stop tokens.
        stopped = (self._stop_ids[:rows] == tokens[:, None]).any(1)
        for row in np.flatnonzero(self._watched[:rows]).tolist():
            sample = self.samples[row]
            assert sample is not None
            assert sample.watch is not None
            stopped[row] |= sample.watch.push([int(tokens[row])]) is not None
        return stopped, self.position[:rows] + 1 >= self._limit[:rows]

    def images(self, row: int) -> ImagePrompt | None:
        """Return the images of a row's prompt."""
        sample = self.samples[row]
        return None if sample is None else sample.owner.images

    def streaming_rows(self) -> list[int]:
        """Return the rows whose tokens are handed out as they come."""
        rows: list[int] = np.flatnonzero(self._streaming[: self.rows]).tolist()
        return rows

    def undelivered(self, row: int) -> int:
        """Return the number of tokens of a row that were not handed out yet."""
        return int(self.position[row]) + 1 - int(self.delivered[row])

    def take(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Return the tokens of a row that were not handed out yet, and their logprobs."""
        start, end = int(self.delivered[row]), int(self.position[row]) + 1
        self.delivered[row] = end
        return self.history[row, start:end].astype(np.uint32), self.logprobs[row, start:end].copy()
