"""What sluice adds to each of SGLang's scheduler processes: a sampler, a hold of tokens, weights.

Works with SGLang 0.5.23, as `client`.

A process has a thread that answers the replica's calls. Weights arrive in a thread of their own;
the scheduler's loop loads them between two steps, when SGLang's own request for new weights
reaches it: all ranks get that request in the same order as pauses and samples.
"""

from __future__ import annotations

import importlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from services.rollout.engines.sglang.sampler import sample_rows, uniform_rows
from services.rollout.engines.sglang.scheduler_calls import serve_calls
from services.rollout.engines.vendor_engines.share_recorder import (
    AsInFiles,
    meta_copy,
    record_share,
)
from services.rollout.engines.vendor_engines.weight_worker import Outcome, WeightWorker
from sluice.errors import ConfigError, WeightSyncError
from sluice.types import TensorSpec
from sluice.weight_share import WeightShare

# Types are checked without SGLang: its values have none here.
# ruff: noqa: ANN401

EVERY_TOKEN = 1
"""``stream_interval`` of a sample whose tokens are sent as they come; the others' is not set."""
_APPLY = "sluice_apply"
_CALL_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 600.0
_HOLD_S = 0.25
_RANK = 3
"""Place of the rank among the arguments of SGLang's scheduler process."""


def run_scheduler(sockets: Sequence[socket.socket], *arguments: Any) -> None:
    """Run SGLang's scheduler with what sluice adds; SGLang starts this process by its name.

    Args:
        sockets: of all ranks; see `SchedulerCalls`.
        arguments: SGLang's own.
    """
    rank = int(arguments[_RANK])
    for place, link in enumerate(sockets):
        if place != rank:
            link.close()
    _install_sampler()
    _install_hold()
    _install_weights(rank, sockets[rank])
    importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(*arguments)


def run_detokenizer(*arguments: Any) -> None:
    """Run SGLang's detokenizer; SGLang starts this process by its name."""
    module: Any = importlib.import_module("sglang.srt.managers.detokenizer_manager")
    module.run_detokenizer_process(*arguments)


class SchedulerModel:
    """The model of one scheduler process.

    Args:
        runner: SGLang's model runner.

    Raises:
        ConfigError: it lacks something; the message names it.
    """

    def __init__(self, runner: Any) -> None:
        loading: Any = importlib.import_module("sglang.srt.model_loader.loader")
        self._loader: Any = getattr(loading, "DefaultModelLoader", None)
        needed_names = ("restore_weights_before_loading", "load_weights_and_postprocess")
        missing_names = [name for name in needed_names if not hasattr(self._loader, name)]
        missing_names += [
            name for name in ("model", "device", "model_config") if not hasattr(runner, name)
        ]
        if missing_names:
            raise ConfigError(f"SGLang has no {', '.join(missing_names)}; install 0.5.23")
        self._runner = runner

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, in the way that SGLang reads a checkpoint."""
        module: Any = importlib.import_module("sglang.srt.model_loader.utils")
        model, device = self._runner.model, torch.device(self._runner.device)
        with module.set_default_torch_dtype(self._runner.model_config.dtype):
            self._loader.restore_weights_before_loading(model, device)
            self._loader.load_weights_and_postprocess(model, weights, device)

    def share(self, tensors: Sequence[TensorSpec], as_in_files: AsInFiles) -> WeightShare:
        """Return which part of the weights this rank's model reads; see `record_share`."""
        return record_share(self.load_without_memory, tensors, as_in_files)

    def load_without_memory(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give weights without memory to the model's loader; the model itself stays as it is."""
        nowhere = torch.device("cpu")  # SGLang would move the tensors to any other device
        model = meta_copy(self._runner.model, _loadable)
        self._loader.restore_weights_before_loading(model, nowhere)
        self._loader.load_weights_only(model, weights, nowhere)


def _loadable(
    module: torch.nn.Module, copy: torch.nn.Module
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's parameters and buffers without memory, with loaders that use its copy."""

    def without_memory(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        copied: Any = tensor.data.to("meta")
        copied.__class__ = type(tensor)
        for name, value in vars(tensor).items():
            is_of_module = isinstance(value, MethodType) and value.__self__ is module
            copied.__dict__[name] = MethodType(value.__func__, copy) if is_of_module else value
        return copied

    return (
        {name: without_memory(tensor) for name, tensor in module._parameters.items()},
        {name: without_memory(tensor) for name, tensor in module._buffers.items()},
    )


class SchedulerWorker(WeightWorker):
    """Receives weights in one scheduler process.

    One thread answers the replica's calls. `take` is called by the scheduler's loop.

    Args:
        rank: of tensor parallelism.
        runner: SGLang's model runner.
    """

    def __init__(self, rank: int, runner: Any) -> None:
        self.rank = rank
        kind = str(runner.device)
        self.device = torch.device("cpu" if kind == "cpu" else f"{kind}:{runner.gpu_id}")
        self._runner = runner
        self._loads: queue.SimpleQueue[tuple[list[Any], Future[Outcome]]] = queue.SimpleQueue()

    def sluice_find_model(self) -> SchedulerModel:
        return SchedulerModel(self._runner)

    def answer(self, method: str, arguments: list[object]) -> object:
        """Answer one call; a load is done by the scheduler's loop."""
        if method != _APPLY:
            return getattr(self, method)(*arguments)
        outcome: Future[Outcome] = Future()
        self._loads.put((arguments, outcome))
        try:
            return outcome.result(_CALL_TIMEOUT_S)
        except TimeoutError:
            if outcome.cancel():  # a later `take` skips it
                return {
                    "error": f"SGLang's loop took no new weights within {_CALL_TIMEOUT_S:g} s",
                    "kind": WeightSyncError.__name__,
                }
        return outcome.result(_LOAD_TIMEOUT_S)

    def take(self, finish: Callable[[], str | None]) -> str | None:
        """Load the weights that the replica calls for; return what went wrong.

        The call may come a little later than SGLang's request.

        Args:
            finish: adopts the weights in the scheduler; returns what went wrong.
        """
        while True:
            try:
                arguments, future = self._loads.get(timeout=_CALL_TIMEOUT_S)
            except queue.Empty:
                return f"no call for new weights came within {_CALL_TIMEOUT_S:g} s"
            if future.set_running_or_notify_cancel():  # else its caller has given up
                break
        outcome = self.sluice_apply(*arguments)
        if "error" not in outcome and (failure := finish()) is not None:
            outcome = {"error": failure, "kind": "EngineError", "broken": True}
        future.set_result(outcome)
        return str(outcome["error"]) if "error" in outcome else None


def _install_weights(rank: int, replica_socket: socket.socket) -> None:
    """Answer the replica's calls once the scheduler runs; give new weights to SGLang's request."""
    managers: Any = importlib.import_module(
        "sglang.srt.managers.scheduler_components.weight_updater"
    )
    outputs: Any = importlib.import_module("sglang.srt.managers.io_struct")
    encoded: Any = importlib.import_module("sglang.srt.managers.mm_schedule")
    kind: Any = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    run = kind.run_event_loop
    workers: list[SchedulerWorker] = []

    def begin(scheduler: Any) -> None:
        worker = SchedulerWorker(rank, scheduler.tp_worker.model_runner)
        workers.append(worker)
        threading.Thread(
            target=serve_calls,
            args=(replica_socket, worker.answer),
            name="sluice-calls",
            daemon=True,
        ).start()
        run(scheduler)

    def update(manager: Any, request: Any) -> Any:
        def finish() -> str | None:
            manager.record_weight_version_after_update(request.weight_version)
            if encoded.embedding_cache is not None:  # images that the old weights encoded
                encoded.embedding_cache.clear()
            flushed, message = manager.flush_cache_after_weight_update(request, True, "")
            return None if flushed else str(message)

        failure = workers[0].take(finish)
        return outputs.UpdateWeightFromDiskReqOutput(
            success=failure is None, message=failure or "", num_paused_requests=0
        )

    kind.run_event_loop = begin
    managers.SchedulerWeightUpdaterManager.update_weights_from_disk = update


def _install_sampler() -> None:
    """Register the sampler, and give every batch its samples' seeds and stop tokens.

    SGLang itself fills seeds in only in its deterministic mode, which restricts the attention, and
    it ignores stop tokens where it ignores the model's end tokens.
    """
    samplers: Any = importlib.import_module("sglang.srt.layers.sampler")
    batches: Any = importlib.import_module("sglang.srt.sampling.sampling_batch_info")

    def make() -> Any:
        sampler = samplers.Sampler()
        sampler.forward = _forward(sampler)
        return sampler

    def enter(info: Any, batch: Any, _: int) -> None:
        for request in batch.reqs:
            request.eos_token_ids = None  # only a request's stop tokens end it
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(
            info.device, non_blocking=True
        )

    samplers.register_sampler_backend("pytorch", make)
    batches.SamplingBatchInfo.adjusted_from_schedule_batch = enter


class StreamThrottle:
    """Chooses the samples whose tokens are sent after a step.

    To send each token costs the scheduler a message and the client a pass for every sample and
    step.

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
        chosen = [sample for sample in samples if not _may_wait(sample)]
        now_s = self._now_s()
        if len(chosen) == len(samples) or now_s < self._due_s:
            return chosen
        self._due_s = now_s + _HOLD_S
        return samples


def _may_wait(sample: Any) -> bool:
    return (
        sample.stream
        and sample.send_token_offset > 0
        and sample.sampling_params.stream_interval != EVERY_TOKEN
        and not sample.finished()
    )


def held_samples(scheduler: Any) -> list[Any]:
    """Return the samples with tokens that were not sent.

    Retracted ones wait in its queue, or are computed again a chunk at a time.
    """
    batches = (scheduler.running_batch, scheduler.last_batch)
    samples = [*scheduler.waiting_queue]
    if scheduler.chunked_req is not None:
        samples.append(scheduler.chunked_req)
    samples += [sample for batch in batches if batch is not None for sample in batch.reqs]
    return [
        sample
        for sample in {id(sample): sample for sample in samples}.values()
        if sample.stream
        and not sample.finished()
        and len(sample.output_ids) > sample.send_token_offset
    ]


def _install_hold() -> None:
    """Make the scheduler hold tokens (`StreamThrottle`), and send them before any answer."""
    send_in_one_order()
    streamers: Any = importlib.import_module(
        "sglang.srt.managers.scheduler_components.output_streamer"
    )
    kind: Any = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    send, answer = streamers.SchedulerOutputStreamer.stream_output, kind.get_internal_state
    hold = StreamThrottle()

    def stream(streamer: Any, samples: Any, *arguments: Any, **keywords: Any) -> None:
        if chosen := hold.choose(samples):
            send(streamer, chosen, *arguments, **keywords)

    def send_then_answer(scheduler: Any, request: Any) -> Any:
        if samples_to_send := held_samples(scheduler):
            send(scheduler.output_streamer, samples_to_send, True)
        return answer(scheduler, request)

    streamers.SchedulerOutputStreamer.stream_output = stream
    kind.get_internal_state = send_then_answer


def send_in_one_order() -> None:
    """Make tokens and answers leave by one socket, so that an answer comes after earlier tokens.

    SGLang sends them by two sockets to one address; two threads of ZeroMQ write them, and on a busy
    machine an answer may overtake the tokens.
    """
    channels: Any = importlib.import_module(
        "sglang.srt.managers.scheduler_components.ipc_channels"
    ).SchedulerIpcChannels
    create = channels.create

    def create_with_one(**settings: Any) -> Any:
        ipc = create(**settings)
        if (unused := ipc.send_to_detokenizer.socket) is not None:  # ranks above 0 have none
            unused.close()
        return replace(ipc, send_to_detokenizer=ipc.send_to_tokenizer)

    channels.create = create_with_one


def _forward(sampler: Any) -> Callable[..., torch.Tensor]:
    def forward(
        output: Any, info: Any, return_logprob: bool, *arguments: Any, **_: Any
    ) -> torch.Tensor:
        positions = arguments[2]  # after SGLang's top_logprobs_nums and token_ids_logprobs
        logits = sampler._preprocess_logits(output.next_token_logits, info)
        uniform = uniform_rows(info.sampling_seed, positions)
        max_top_k = info.max_top_k if info.need_top_k_sampling else None
        tokens, logprobs = sample_rows(
            logits, info.temperatures, info.top_ks, info.top_ps, max_top_k, uniform
        )
        if return_logprob:
            output.next_token_logprobs = logprobs
            if any(arguments[0]):  # for logprobs of the prompt; those of the response are not read
                output.next_token_top_logprobs_val = list(logprobs[:, None])
                output.next_token_top_logprobs_idx = list(tokens[:, None])
        return tokens.to(torch.int32)

    return forward
