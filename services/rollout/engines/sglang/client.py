"""SGLang's client and scheduler: what the adapter uses of them.

Works with SGLang 0.5.23, whose Python API changes often: what another version lacks is named when
it starts.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import inspect
import multiprocessing
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from services.rollout.engines.settings import installed_version, refuse_unknown
from services.rollout.engines.sglang.scheduler import EVERY_TOKEN, run_detokenizer, run_scheduler
from services.rollout.engines.sglang.scheduler_calls import SchedulerCalls
from services.rollout.engines.vendor_engines.request import EngineDelta, SamplingChoice
from sluice.errors import ConfigError, EngineError, MissingPackageError, leaves
from sluice.types import PromptLogprobs
from sluice.vision.image_prompts import ImagePrompt

_ONE_TOKEN = float(np.finfo(np.float32).tiny)
"""A nucleus that holds only the most probable token."""
_CALL_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
_SETTLING_TURNS = 1000
_NEEDED = (
    *("generate_request", "pause_generation", "continue_generation", "get_internal_state"),
    "update_weights_from_disk",
)


def sampling_parameters(choice: SamplingChoice, *, every_token: bool) -> dict[str, object]:
    """Return the sampling parameters of a request of SGLang."""
    top_k, top_p = choice.top_k, choice.top_p
    if top_k == 1 and choice.temperature > 0:
        # SGLang treats that as temperature 0, whose logprobs are those at temperature 1.
        top_k, top_p = -1, _ONE_TOKEN
    return {
        "temperature": choice.temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": choice.max_tokens,
        "sampling_seed": choice.seed,
        "stop_token_ids": list(choice.stop_token_ids),
        # True would ignore stop tokens too. The scheduler's patch (`_install_sampler`) makes the
        # request's stop tokens the only ones, whether the model's end tokens are among them or not.
        "ignore_eos": False,
        "stream_interval": EVERY_TOKEN if every_token else None,
    }


def read_delta(request_id: str, output: Mapping[str, Any], num_known: int) -> EngineDelta:
    """Return the new tokens of an output of SGLang; some outputs repeat an earlier token.

    Args:
        request_id: for errors.
        num_known: earlier tokens of the sample.

    Raises:
        EngineError: SGLang refused the sample, or tokens are missing.
    """
    reported = output["meta_info"]
    reason = reported.get("finish_reason") or {}
    if reason.get("type") == "abort" and reason.get("status_code") is not None:
        raise EngineError(f"SGLang: sample {request_id} was refused: {reason.get('message')}")
    num_new = int(reported["completion_tokens"]) - num_known
    tokens = list(output["output_ids"])[-num_new:] if num_new else []
    logprobs = [float(entry[0]) for entry in reported.get("output_token_logprobs", ())][-num_new:]
    if len(tokens) != num_new or (num_new and len(logprobs) != num_new):
        raise EngineError(
            f"SGLang: {num_new} tokens of sample {request_id} came as {len(tokens)} token ids with "
            f"{len(logprobs)} logprobs"
        )
    return EngineDelta(
        tokens,
        logprobs if num_new else [],
        reason.get("type"),
        reported.get("cached_tokens"),
        tuple(
            (entry["version"], entry["start"], entry["end"])
            for entry in reported.get("weight_versions", ())
        ),
    )


def read_prompt_logprobs(output: Mapping[str, Any]) -> PromptLogprobs:
    """Return the logprobs of the prompt of the first output of a sample."""
    reported = output["meta_info"]
    # The first token has none.
    own_logprobs, tops = reported["input_token_logprobs"][1:], reported["input_top_logprobs"][1:]
    return PromptLogprobs(
        np.array([logprob for logprob, *_ in own_logprobs], np.float32),
        np.array([token for ((_, token, *_),) in tops], np.uint32),
        np.array([logprob for ((logprob, *_),) in tops], np.float32),
    )


def image_data(images: ImagePrompt, num_tokens: int) -> dict[str, object]:
    """Return SGLang's ``image_data`` for a prompt and what follows it, `num_tokens` in all.

    SGLang would resize images by its own rules and read the prompt's text again. It takes the
    patches and positions that the trainer has too, with the token ids as they are. Image tokens
    behind the prompt are text.
    """
    offsets, place = [], 0
    for count in images.num_tokens.tolist():
        image_places = images.places[place : place + count]
        offsets.append((int(image_places[0]), int(image_places[-1])))
        place += count
    positions = images.positions
    return {
        "format": "processor_output",
        "pixel_values": torch.from_numpy(images.pixel_values),
        "image_grid_thw": torch.from_numpy(images.grid_thw),
        "offsets": offsets,
        "mrope_positions": torch.from_numpy(positions.extend(num_tokens)),
        "mrope_position_delta": torch.tensor([[positions.shift]]),
    }


# Types are checked without SGLang: its values have none here.
# ruff: noqa: ANN401


def installed_sglang() -> str | None:
    """Return the version of SGLang in this environment; import nothing."""
    return installed_version("sglang")


def engine_environment(
    environment: Mapping[str, str], *, on_cpu: bool, threads: int, ranks: int = 1
) -> dict[str, str]:
    """Return variables that SGLang and its processes read when they are imported; set ones stay."""
    # SGLang keeps some tokens of its context for itself; see `SglangSettings.engine_arguments`.
    variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if not on_cpu:
        # SGLang would set 0. Then NCCL connects no GPU of this process to one of the trainer's,
        # where its own choice holds, as with -2.
        variables["NCCL_CUMEM_ENABLE"] = "-2"
    else:
        variables |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
        if ranks > 1:  # SGLang itself takes no more of them than the machine has memory nodes
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_by_rank(ranks)
    return {name: value for name, value in variables.items() if name not in environment}


def _cores_by_rank(ranks: int) -> str:
    """Return the cores of each rank as SGLang reads them; ranks share cores if these are few."""
    cores = sorted(os.sched_getaffinity(0))
    cores_per_rank = max(1, len(cores) // ranks)
    firsts = [rank * cores_per_rank % len(cores) for rank in range(ranks)]
    return "|".join(
        ",".join(map(str, cores[first_core : first_core + cores_per_rank])) for first_core in firsts
    )


class SglangClient:
    """SGLang's asynchronous engine. Everything is called in one event loop.

    Args:
        arguments: of SGLang's engine, by its own names.
        ranks: scheduler processes, which share the model.
        recomputes: caches of running samples are recomputed at updates of weights.

    Attributes:
        on_death: called in that loop when a process of SGLang ends.

    Raises:
        MissingPackageError: SGLang, or a library that it needs, is not installed.
        ConfigError: its import fails otherwise, or it refuses the arguments.
        EngineError: it did not start.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        *,
        ranks: int = 1,
        recomputes: bool = False,
    ) -> None:
        self._recomputes = recomputes
        try:
            engines: Any = importlib.import_module("sglang.srt.entrypoints.engine")
            self._requests: Any = importlib.import_module("sglang.srt.managers.io_struct")
        except (ImportError, OSError, RuntimeError) as error:
            # A library that probes a device may raise the last, and a restart may help.
            is_missing = not isinstance(error, RuntimeError)
            raise (MissingPackageError if is_missing else ConfigError)(
                f"actor_rollout_ref.rollout.name is 'sglang', but SGLang cannot be imported "
                f"({error!r}); install sglang 0.5.23 in an environment of its own (it needs "
                "another torch than vLLM does), or set actor_rollout_ref.rollout.name=torch"
            ) from error
        self.version = installed_sglang() or "of unknown version"
        parameters = inspect.signature(engines.ServerArgs).parameters
        refuse_unknown("SGLang", self.version, arguments, parameters)
        processes_before = set(multiprocessing.active_children())
        sockets = _sockets()
        self._schedulers = SchedulerCalls(ranks)
        try:
            self._engine: Any = _start(engines, arguments, self._schedulers)
        except Exception as error:
            self._schedulers.close()
            _end(_new_children(processes_before))
            _close(_sockets() - sockets)
            kind = ConfigError if isinstance(error, ValueError | TypeError) else EngineError
            raise kind(
                f"SGLang {self.version} did not start: {error}; see the output of its processes "
                "above; check actor_rollout_ref.rollout and its engine_kwargs.sglang"
            ) from error
        self._processes = _new_children(processes_before)
        self._sockets = _sockets() - sockets
        self._manager: Any = self._engine.tokenizer_manager
        _stop_watchdog(self._manager)
        self.on_death: Callable[[], None] = lambda: None
        self._is_broken = False
        self._deadlines: set[asyncio.Timeout] = set()
        self._loop = asyncio.get_running_loop()
        for process in self._processes:
            self._loop.add_reader(process.sentinel, self._note_death)

    def _note_death(self) -> None:
        self._unwatch()
        self._is_broken = True
        for deadline in self._deadlines:
            deadline.reschedule(self._loop.time())
        self.on_death()

    def _unwatch(self) -> None:
        for process in self._processes:
            self._loop.remove_reader(process.sentinel)

    @property
    def kv_tokens(self) -> int:
        started = getattr(self._engine, "_scheduler_init_result", None)
        infos = getattr(started, "scheduler_infos", None) or [{}]
        return int(infos[0].get("max_total_num_tokens", 0))

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        salt: str,
        choice: SamplingChoice,
        priority: int = 0,
        *,
        every_token: bool = True,
        images: ImagePrompt | None = None,
    ) -> AsyncIterator[EngineDelta]:
        """Sample one sample. Cancelling the consumer aborts it.

        Args:
            request_id: differs from that of every other running sample; none begins another.
            prompt: token ids.
            salt: prompts with different salts share nothing in the prefix cache.
            choice: how to sample.
            priority: higher ones go first; 0 is the usual one.
            every_token: tokens come one by one, and not some together.
            images: at the beginning of the prompt, if there are any.

        Raises:
            EngineError: SGLang failed.
        """
        request = self._requests.GenerateReqInput(
            rid=request_id,
            input_ids=list(prompt),
            image_data=None if images is None else [image_data(images, len(prompt))],
            sampling_params=sampling_parameters(choice, every_token=every_token),
            return_logprob=True,
            # Without a start SGLang reports logprobs from the response on.
            **({"logprob_start_len": 0, "top_logprobs_num": 1} if choice.prompt_logprobs else {}),
            stream=True,
            priority=priority,
            cache_salt=salt,
        )
        num_known = 0
        try:
            async with aclosing(self._manager.generate_request(request, None)) as outputs:
                async for output in outputs:
                    delta = read_delta(request_id, output, num_known)
                    if choice.prompt_logprobs and not num_known:
                        delta = replace(delta, prompt_logprobs=read_prompt_logprobs(output))
                    num_known += len(delta.token_ids)
                    yield delta
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"SGLang: sample {request_id} failed: {error!r}") from error

    async def pause(self, *, recomputes: bool) -> None:
        mode = "retract" if recomputes else "in_place"
        pausing = self._requests.PauseGenerationReqInput(mode=mode)
        await self._answer(self._manager.pause_generation(pausing), "pause", _CALL_TIMEOUT_S)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Wait until consumers have taken the tokens so far.

        SGLang would merge them with later ones.

        Raises:
            EngineError: the scheduler did not answer, or a consumer does not take its tokens.
        """
        # The scheduler sends what it holds before its answer, by the same socket.
        await self.check_alive(_CALL_TIMEOUT_S)
        for _ in range(_SETTLING_TURNS):
            states = self._manager.rid_to_state.values()
            if not any(state.out_list and not state.abort_sent for state in states):
                return
            await asyncio.sleep(0)
        raise EngineError("SGLang: tokens that came before a pause were not taken")

    async def resume(self) -> None:
        resume_request = self._requests.ContinueGenerationReqInput()
        await self._answer(
            self._manager.continue_generation(resume_request), "resume", _CALL_TIMEOUT_S
        )

    async def check_alive(self, timeout_s: float) -> None:
        """Wait until the scheduler's loop has answered, after everything sent to it before."""
        await self._answer(self._manager.get_internal_state(), "a question", timeout_s)

    async def call_workers(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        called = self._schedulers.call(method, arguments)
        if method == "sluice_apply":
            called = self._call_load(called, str(arguments[0]))
        return list(await self._answer(called, method, timeout_s))

    async def _call_load(
        self, called: Coroutine[Any, Any, list[object]], version: str
    ) -> list[object]:
        """Return the answers to a call that the schedulers' loops do for a request of SGLang's."""
        update = self._requests.UpdateWeightFromDiskReqInput(
            model_path="", flush_cache=self._recomputes, weight_version=version
        )
        async with asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(called)
            # What its answer says of the first rank is among `answers`.
            await self._manager.update_weights_from_disk(update, None)
        return answers.result()

    async def _answer(self, call: Awaitable[Any], action: str, timeout_s: float) -> Any:
        """Return SGLang's answer; raise EngineError for its errors, its silence and its end."""
        deadline = asyncio.timeout(0 if self._is_broken else timeout_s)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                return await call
        except TimeoutError as error:
            why = "one of its processes has ended" if self._is_broken else f"{timeout_s:g} s"
            raise EngineError(f"SGLang: no answer to {action} ({why})") from error
        except Exception as error:
            cause = leaves(error)[0] if isinstance(error, ExceptionGroup) else error
            raise EngineError(f"SGLang: {action} failed: {cause!r}") from error
        finally:
            self._deadlines.discard(deadline)

    async def close(self) -> None:
        """End SGLang's processes; call nothing else after it."""
        self._unwatch()
        # It would end every child of this process, sluice's own among them.
        atexit.unregister(self._engine.shutdown)
        tasks = list(self._manager.asyncio_tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
        self._schedulers.close()
        await asyncio.to_thread(_end, self._processes)
        _close(self._sockets)


def _start(engines: Any, arguments: Mapping[str, object], schedulers: SchedulerCalls) -> Any:
    missing_names = [name for name in _NEEDED if not hasattr(engines.TokenizerManager, name)]
    if missing_names:
        raise TypeError(f"it has no {', '.join(missing_names)}; install 0.5.23")
    processes = {
        "run_scheduler_process_func": staticmethod(partial(run_scheduler, schedulers.theirs)),
        "run_detokenizer_process_func": staticmethod(run_detokenizer),
    }
    kind: Any = type("Engine", (engines.Engine,), processes)
    return kind(**arguments)


def _new_children(processes_before: set[BaseProcess]) -> list[BaseProcess]:
    return [
        process for process in multiprocessing.active_children() if process not in processes_before
    ]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_END_TIMEOUT_S)


def _sockets() -> set[Any]:
    """Return the sockets of SGLang's messages, which nothing lists, without second handles."""
    kind: Any = importlib.import_module("zmq").Socket
    # Not `isinstance`: it asks objects for their class, and some objects act on that.
    sockets = [socket for socket in gc.get_objects() if issubclass(type(socket), kind)]
    return {socket for socket in sockets if not socket._shadow}


def _close(sockets: Iterable[Any]) -> None:
    """Close sockets that SGLang leaves to the garbage collector.

    It may take their context first, and the end of a context waits for its sockets for ever.
    """
    for socket in sockets:
        socket.close(linger=0)


def _stop_watchdog(manager: Any) -> None:
    """Stop the watchdog that answers the end of a process with a signal that ends this one."""
    watchdog = getattr(manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
