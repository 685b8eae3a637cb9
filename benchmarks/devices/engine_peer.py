"""A replica's vLLM: samples as sluice reads them, or vLLM alone.

``python -m benchmarks.devices.engine_peer`` in an environment that has vLLM. `engines` steers it.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from benchmarks.engine.peer import Peer
from benchmarks.peers import serve
from services.rollout.engines.protocol import GenerationRequest
from sluice.types import SamplingParams

_PARTIAL_INTERVAL_S = 0.5
"""As the reward service asks for by default."""


class EnginePeer(Peer):
    """Its public methods are the operations."""

    async def serve_dummies(self) -> None:
        """Let vLLM's random weights serve as version 0, without a transfer."""
        thread, core = self._inside()
        await thread.call(core._client.tag_version("0"), "naming a version")
        core.version, core.digest = 0, "random"

    async def groups(self, groups: int, samples: int, new_tokens: int) -> dict[str, Any]:
        """Sample groups as the service does; return tokens, seconds and CPU seconds."""
        sampling = SamplingParams(1.0, 1.0, -1, new_tokens, 0, (), ignore_eos=True)

        async def group(number: int, prompt: Any) -> int:  # noqa: ANN401 - an array
            asked = GenerationRequest(str(number), prompt, tuple(range(samples)), sampling)
            stream: Any = self._engine.generate(
                asked, every_token=False, partial_interval_s=_PARTIAL_INTERVAL_S
            )
            async with aclosing(stream) as parts:
                return sum([chunk.behavior_logprobs.size async for part in parts for chunk in part])

        prompts = self._prompts(groups)
        return await _timed([group(number, prompt) for number, prompt in enumerate(prompts)])

    async def alone(self, groups: int, samples: int, new_tokens: int) -> dict[str, Any]:
        """Sample as many by vLLM's own client alone, which reports whole samples only."""
        thread, core = self._inside()
        llm, client = core._client._llm, core._client
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind

        async def one(number: int, prompt: list[int]) -> int:
            sampling = client._make_sampling(
                temperature=1.0,
                max_tokens=new_tokens,
                seed=number,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=kinds.FINAL_ONLY,
            )
            asked = {"prompt_token_ids": prompt, "cache_salt": "0"}
            outputs = [each async for each in llm.generate(asked, sampling, f"alone-{number}")]
            return len(outputs[-1].outputs[0].logprobs)

        prompts = self._prompts(groups).tolist()
        every = [one(number, prompts[number // samples]) for number in range(groups * samples)]
        found: dict[str, Any] = await thread.call(_timed(every), "sampling alone")
        return found

    def _inside(self) -> tuple[Any, Any]:
        engine: Any = self._engine
        return engine._thread, engine._core


async def _timed(calls: list[Coroutine[Any, Any, int]]) -> dict[str, Any]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(call) for call in calls]
    return {
        "tokens": sum(task.result() for task in running),
        "seconds": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
    }


async def main() -> None:
    """Answer operations until the input ends."""
    async with asyncio.TaskGroup() as tasks:
        await serve(EnginePeer(tasks))


if __name__ == "__main__":
    asyncio.run(main())
