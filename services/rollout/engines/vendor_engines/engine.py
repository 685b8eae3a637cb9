"""The core of a vendor's engine, shared by all vendors.

`VendorCore` lives in the event loop of the vendor's client; `ThreadedEngine` is what the service's
event loop sees of it. Weights go straight to the workers of the vendor's engine; each is a rank of
the transfer group.

Consumes: coroutines begun by the service's event loop. Produces: chunks, posted as they come.
Waits for: the vendor's processes, each call with a deadline.
On failure: if one sample fails, its request fails. If a swap fails half-way, the weights that would
    sample the next token are unknown; if it cannot resume, nothing is sampled. In both cases every
    running request fails, and the engine stays broken.
On shutdown: running samples are aborted and delivered, then the vendor's processes end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import torch

from services.rollout.engines.causal_lm import CausalLM, CheckpointLayout, build_causal_lm
from services.rollout.engines.protocol import GenerationRequest, StagedVersion
from services.rollout.engines.settings import FILES_DIGEST, FILES_VERSION, VendorSettings
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.threaded_engine import EngineCore, FlushPolicy
from services.rollout.engines.vendor_engines.request import (
    EngineDelta,
    RequestRun,
    VendorSample,
    VersionSpans,
)
from services.rollout.engines.vendor_engines.share_recorder import checkpoint_names
from services.rollout.engines.vendor_engines.worker_group import (
    WorkerBegin,
    WorkerCalls,
    WorkerGroup,
)
from services.rollout.engines.weight_inbox import check_epoch
from sluice.checkpoint.safetensors_files import tensor_names
from sluice.errors import ConfigError, EngineError, NotReadyError, WeightSyncError, leaves
from sluice.types import TransferGroupSpec
from sluice.vision.image_prompts import ImagePromptReader

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 20.0


def described_model(settings: VendorSettings) -> CausalLM:
    """Return the model without memory; its files are checked if the vendor's engine serves them.

    Raises:
        CheckpointError: a file of weights is missing or damaged.
        ConfigError: the path holds no model.
    """
    described = build_causal_lm(
        settings.model_path,
        torch.device("meta"),
        trust_remote_code=settings.trust_remote_code,
        dtype=settings.dtype,
    )
    if settings.serves_model_files:
        check_files(Path(settings.model_path), described)
    return described


def check_files(folder: Path, described: CausalLM) -> None:
    """Refuse files without all weights of a model, which a vendor's engine might make up.

    Files with names that transformers does not write are left to the vendor.

    Args:
        folder: the model's folder.
        described: the model, without memory.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks a tensor that the index names.
        ConfigError: other weights are missing.
    """
    names = tensor_names(folder).keys()
    in_files, state = checkpoint_names(described.model), described.model.state_dict()
    known_names = in_files(state).keys()
    expected_names = in_files({spec.name: state[spec.name] for spec in described.layout.tensors})
    missing_names = expected_names.keys() - names
    if not names or (missing_names and names <= known_names):
        lacks = (
            f"{len(missing_names)} weights, first {min(missing_names)}"
            if names
            else "*.safetensors"
        )
        raise ConfigError(
            f"actor_rollout_ref.model.path={str(folder)!r} lacks {lacks}; copy the complete "
            "checkpoint"
        )


class VendorClient(WorkerCalls, Protocol):
    """The methods of a vendor's client that all cores use.

    All calls raise EngineError if the vendor's engine fails, or does not answer in time.
    """

    @property
    def kv_tokens(self) -> int:
        """Most tokens in the KV cache; 0 if unknown."""
        ...

    async def pause(self, *, recomputes: bool) -> None:
        """Stop sampling; return after earlier tokens have reached their consumers.

        Args:
            recomputes: make running samples recompute their cache when they continue.
        """
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...

    async def close(self) -> None:
        """End the vendor's processes; call nothing else after it."""
        ...


class VendorCore(EngineCore[RequestRun]):
    """The engine and the weights that it serves.

    Args:
        client: the vendor's client.
        layout: the layout of the model's checkpoint.
        settings: the engine's settings.
        image_prompts: prepares images for the model; ``None`` if it takes none.
    """

    slots_may_wait = True
    abort_timeout_s = 30.0
    first_goes_ahead = False
    """Whether other samples wait until the first has put the prompt into the prefix cache."""
    version: int | None = None
    digest: str = ""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    _epoch: int | None = None

    def __init__(
        self,
        client: VendorClient,
        layout: CheckpointLayout,
        settings: VendorSettings,
        image_prompts: ImagePromptReader | None = None,
    ) -> None:
        super().__init__(layout, image_prompts)
        self.client = client
        self.settings = settings
        self.counts = self
        self.workers = WorkerGroup(client, self.name)
        self._runs: set[RequestRun] = set()
        self._idle = asyncio.Event()
        self._swapping = asyncio.Lock()
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    async def open(self, device: str) -> None:
        """Prepare the workers for weights; serve those of the model's files if configured.

        Args:
            device: kind of device that the vendor computes on.

        Raises:
            ConfigError: this version of the vendor's engine lacks what is needed; its processes
                have ended.
        """
        settings = self.settings
        begin = WorkerBegin(
            device=device,
            backend=settings.weights_backend,
            tensors=self.layout.tensors,
            model_path=settings.model_path,
            trust_remote_code=settings.trust_remote_code,
        )
        try:
            self.weight_shares = await self.workers.begin(begin)
            if settings.serves_model_files:
                await self._note_weights(FILES_VERSION)
                self.version, self.digest = FILES_VERSION, FILES_DIGEST
        except BaseException:  # its processes end only with this one, which may live on
            await self.client.close()
            raise
        self.kv_tokens = self.client.kv_tokens

    def _break(self, error: EngineError) -> None:
        """Cancel all runs, since their tokens would carry a wrong version."""
        self._broken = error
        for run in self._runs:
            run.cancel()

    @abstractmethod
    def seed(self, request: GenerationRequest, index: int, num_continued: int) -> int:
        """Return the seed of a sample that continues `num_continued` tokens."""

    @abstractmethod
    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[EngineDelta]:
        """Sample one sample; closing the iterator aborts it.

        Unless `run.reads_tokens`, tokens may come together, and the last delta leaves out those
        that `so_far` returned.
        """

    def so_far(self, _run: RequestRun, _sample: VendorSample) -> EngineDelta | None:
        """Return the tokens of a running sample that `deltas` holds back, without waiting.

        ``None`` if there are no new ones.
        """
        return None

    def serving_version(self) -> int:
        """Return the version that samples tokens now. Raises EngineError if there is none."""
        if self.version is None:
            raise EngineError(f"{self.name}: a sample runs before the first weights")
        return self.version

    def count(self, sampled: int, prompt: int = 0, cached: int = 0) -> None:
        """Count sampled tokens, prompt tokens and prompt tokens from the cache."""
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
        for posted_version, version in zip(
            sample.versions[: sample.num_posted], reported, strict=False
        ):
            if posted_version != version:
                raise EngineError(
                    f"{self.name}: a token handed on as version {posted_version} was sampled by "
                    f"version {version}"
                )
        sample.versions = reported

    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        pace: FlushPolicy,
        stream: ChunkStream,
        images: Any = None,  # noqa: ANN401 - each vendor's own
    ) -> RequestRun:
        return RequestRun(number, request, pace, self, stream, images)

    def catch_up(self) -> None:
        """Take all tokens sampled so far; see `RequestRun.catch_up`."""
        for run in self._runs:
            run.catch_up()

    async def wait_to_begin(self) -> None:
        """Wait until no swap is running, so that the serving weights sample the requests sent
        next."""
        while not self._may_begin.is_set():  # it may be cleared before a waiter gets its turn
            await self._may_begin.wait()

    async def run(self, run: RequestRun) -> None:
        error: EngineError | None = None
        self._runs.add(run)
        self._idle.clear()
        try:
            self._check_works()  # the engine may have broken meanwhile
            await run.run()
        except EngineError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 - nothing else learns of it
            cause = leaves(failed)[0] if isinstance(failed, ExceptionGroup) else failed
            _log.error("%s: a request failed", self.name, exc_info=failed)
            error = EngineError(f"{self.name}: a request failed: {cause!r}")
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()
            # What broke the engine explains more than the cancellation that followed.
            run.stream.end(self._broken or error)

    async def cancel(self, run: RequestRun) -> None:
        if run in self._runs:
            run.cancel()

    async def join(self, spec: TransferGroupSpec) -> str:
        self._epoch = spec.epoch
        await self.wake()
        # It may have been aborted meanwhile.
        check_epoch(spec.epoch, self._epoch, f"joining epoch {spec.epoch}")
        return await self.workers.join(spec)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        phase = f"staging version {version}"
        check_epoch(epoch, self._epoch, phase)
        await self.wake()
        check_epoch(epoch, self._epoch, phase)  # it may have been aborted meanwhile
        staged = await self.workers.stage(version)
        check_epoch(epoch, self._epoch, phase)
        return staged

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        check_epoch(epoch, self._epoch, f"committing version {version}")
        return await self.swap(version, digest)

    async def abort(self, epoch: int, reason: str) -> None:
        if epoch == self._epoch:
            self._epoch = None
            await self.workers.abort(reason)

    async def wait_until_swapped(self) -> None:
        async with self._swapping:
            self._check_works()

    async def swap(self, version: int, digest: str) -> float:
        """Make the model compute with the staged weights; return the seconds without a token.

        Raises:
            NotReadyError: it sleeps.
            WeightSyncError: something else is staged, or nothing; the old weights stay.
            EngineError: the model could not take the weights, or the vendor's engine does not
                resume; the engine is broken.
        """
        async with self._swapping:
            self._check_works()
            if (self.version, self.digest) == (version, digest):
                return 0.0
            if self.is_asleep:
                raise NotReadyError(
                    f"{self.name} sleeps while the trainer trains, and swaps no weights; try again "
                    "after the next version"
                )
            # Before the pause: a refusal must not cost any sampling.
            await self.workers.check_staged(version, digest)
            started = time.perf_counter()
            # A sample that came now would be sent under a version that may not sample it.
            self._may_begin.clear()
            try:
                await self.client.pause(recomputes=self.settings.recompute_kv)
                self.catch_up()  # tokens so far belong to the old version
                await self._take(version, digest)
            finally:
                if self._broken is None:
                    await self._resume(version)
                self._may_begin.set()
            return time.perf_counter() - started

    async def _take(self, version: int, digest: str) -> None:
        """Load the staged weights during a pause; see `swap`."""
        try:
            await self.workers.apply(version)
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

    async def _note_weights(self, version: int) -> None:
        """Prepare for samples of the weights that the model has taken."""

    async def _resume(self, version: int) -> None:
        """Resume; an engine that stayed paused would take new samples and never end them."""
        try:
            await self.client.resume()
        except EngineError as error:
            broken = EngineError(f"{error}, after version {version} came; restart the replica")
            self._break(broken)
            raise broken from error

    async def wake(self) -> None:
        """Restore the memory that a sleep freed and resume sampling; by default there is no sleep.

        Raises:
            EngineError: the memory is not there; the engine is broken.
        """

    async def close(self) -> None:
        """Abort and deliver running samples, and end the vendor's processes."""
        try:
            for run in self._runs:
                self._give_up(run)
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if self._runs:
                    await self._idle.wait()
                await self.workers.close()
        except (TimeoutError, EngineError) as error:
            _log.warning("%s did not end in order: %r", self.name, error)
        finally:
            await self.client.close()

    def _give_up(self, run: RequestRun) -> None:
        try:
            run.give_up()
        except Exception as error:  # noqa: BLE001 - the other runs and the processes end all the same
            _log.warning("%s: a request could not be delivered at the end: %r", self.name, error)
