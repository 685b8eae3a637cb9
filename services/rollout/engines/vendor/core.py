"""A vendor's engine in the event loop of its client: what the cores of all vendors share.

Consumes: coroutines begun by the service's event loop. Produces: chunks, posted as they come.
Waits for: the vendor's processes, each call with a deadline.
On failure: if one sample fails, its request fails. If a swap fails half-way, the weights that would
    sample the next token are unknown; if it cannot resume, nothing is sampled. In both cases every
    running request fails, and the engine stays broken.
On shutdown: what runs is aborted and delivered, then the vendor's processes end.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.settings import FILES_DIGEST, FILES_VERSION
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.threaded_engine import EngineCore, Pace
from services.rollout.engines.vendor.request import (
    ModelLimits,
    RequestRun,
    Vendor,
    VendorSample,
    VersionSpans,
)
from services.rollout.engines.vendor.weight_workers import WeightWorkers
from sluice.errors import EngineError, WeightSyncError


class VendorCore(EngineCore[RequestRun], Vendor):
    """The engine and the weights that it serves.

    Args:
        layout: of the model's checkpoint.
        max_model_len: prompt plus response tokens of a sample.
        workers: receive the weights, and load them into the model.
    """

    slots_may_wait = True
    abort_timeout_s = 30.0
    version: int | None = None
    digest: str = ""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0

    def __init__(
        self, layout: CheckpointLayout, max_model_len: int, workers: WeightWorkers
    ) -> None:
        super().__init__(layout)
        self.workers = workers
        self.limits = ModelLimits(max_model_len, layout.eos_token_ids)
        self._runs: set[RequestRun] = set()
        self._idle = asyncio.Event()
        self._swapping = asyncio.Lock()

    def _break(self, error: EngineError) -> None:
        """Cancel all runs: their tokens would carry the version of other weights."""
        self._broken = error
        for run in self._runs:
            run.cancel()

    def serving_version(self) -> int:
        """Return the version that samples tokens now. Raises EngineError if there is none."""
        if self.version is None:
            raise EngineError(f"{self.name}: a sample runs before the first weights")
        return self.version

    def count(self, sampled: int, prompt: int = 0, cached: int = 0) -> None:
        """Count sampled response tokens, and those of a prompt and of its part from the cache."""
        self.generated_tokens += sampled
        self.prompt_tokens += prompt
        self.reused_tokens += cached

    def check_versions(self, sample: VendorSample, spans: VersionSpans) -> None:
        """Replace a finished sample's versions by the vendor's account of them, where it gives one.

        Raises:
            EngineError: tokens that were posted already belong to other weights.
        """
        if not spans:
            return
        reported = [int(version) for version, start, end in spans for _ in range(start, end)]
        if len(reported) != len(sample.versions):
            raise EngineError(
                f"{self.name}: version spans of {len(reported)} tokens for a sample of "
                f"{len(sample.versions)}"
            )
        for known, version in zip(sample.versions[: sample.num_posted], reported, strict=False):
            if known != version:
                raise EngineError(
                    f"{self.name}: a token handed on as version {known} was sampled by version "
                    f"{version}"
                )
        sample.versions = reported

    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        pace: Pace,
        stream: ChunkStream,
        images: Any = None,  # noqa: ANN401 - each vendor's own
    ) -> RequestRun:
        """Return a run for `run`."""
        return RequestRun(number, request, pace, self, stream, images)

    def catch_up(self) -> None:
        """Take the tokens of all samples that were sampled so far; see `RequestRun.catch_up`."""
        for run in self._runs:
            run.catch_up()

    async def run(self, run: RequestRun) -> None:
        """Sample a request, and end its stream in any case."""
        error: EngineError | None = None
        self._runs.add(run)
        self._idle.clear()
        try:
            self._check_works()  # the engine may have broken meanwhile
            await run.run()
        except EngineError as failed:
            error = failed
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()
            # What broke the engine explains more than the cancellation that followed.
            run.stream.end(self._broken or error)

    async def cancel(self, run: RequestRun) -> None:
        """Abort the samples of one request."""
        if run in self._runs:
            run.cancel()

    async def swapped(self) -> None:
        """Wait until no swap is under way."""
        async with self._swapping:
            self._check_works()

    @abstractmethod
    async def swap(self, version: int, digest: str) -> float:
        """Make the model compute with the staged weights; return the seconds without a token.

        Raises:
            WeightSyncError: something else is staged, or nothing; the old weights stay.
            EngineError: the model could not take the weights, or the vendor's engine does not
                resume; the engine is broken.
        """

    async def _take(self, version: int, digest: str) -> None:
        """Load the staged weights during a pause; see `swap`."""
        try:
            await self.workers.apply(version, digest)
            await self._note_weights(version)
        except WeightSyncError:  # no worker has it: the old weights stay
            raise
        except BaseException as error:
            if isinstance(error, EngineError):
                self._break(error)
            else:
                failure = f"{self.name}: taking version {version} failed ({error!r})"
                self._break(EngineError(f"{failure}; restart the replica"))
            raise
        self.version, self.digest = version, digest

    async def serve_files(self) -> None:
        """Sample with the weights that the vendor's engine has read from the model's files."""
        await self._note_weights(FILES_VERSION)
        self.version, self.digest = FILES_VERSION, FILES_DIGEST

    async def wake(self) -> None:
        """Bring back what a sleep freed, and sample again; by default there is no sleep.

        Raises:
            EngineError: the memory is not there; the engine is broken.
        """

    async def _note_weights(self, version: int) -> None:
        """Prepare for the samples of weights that the model has taken."""

    async def _resume_after_swap(self, resuming: Coroutine[Any, Any, None], version: int) -> None:
        """Resume; an engine that stayed paused would take new samples and never end them."""
        try:
            await resuming
        except EngineError as error:
            broken = EngineError(f"{error}, after version {version} came; restart the replica")
            self._break(broken)
            raise broken from error
