"""One side of `make bench-engine` and `make bench-sync`: an engine, or transformers `generate`.

``python -m benchmarks.engine.peer`` in an environment that has the engine. Each public method of
`Peer` is an operation, answered by one line when it is done.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from benchmarks.peers import serve
from services.rollout.engines.protocol import Engine, GenerationRequest
from services.rollout.engines.registry import create_engine
from sluice.config.loading.loader import load_config
from sluice.types import SamplingParams, TransferGroupSpec
from sluice.weights import transfer
from sluice.weights.digest import DIGEST_BYTES, WeightDigests
from sluice.weights.plan import Bucket, TransferPlan

PROMPT_TOKENS = 20
TRANSFORMERS = "hf"


class NoDigest:
    """In place of `StreamDigest`, to measure what that costs."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan

    def absorb(self, bucket: Bucket, content: object) -> None:
        """Take nothing in."""

    def digests(self) -> WeightDigests:
        """Return the same for everything."""
        names = tuple(spec.name for spec in self._plan.tensors)
        return WeightDigests(names, (bytes(DIGEST_BYTES),) * len(names))


class _EngineSide:
    """An engine behind the Protocol, made as a replica makes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.layout: object = msgspec.to_builtins(tuple(engine.weight_layout))

    async def draw(self, prompts: np.ndarray, new_tokens: int) -> int:
        """Return the number of tokens with a logprob; one call a prompt, as the reward service."""
        async with asyncio.TaskGroup() as tasks:
            sampled = [
                tasks.create_task(self._one(str(number), prompt, new_tokens))
                for number, prompt in enumerate(prompts)
            ]
        return sum(task.result() for task in sampled)

    async def sample(
        self, prompt: Sequence[int], samples: int, new_tokens: int, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return tokens and logprobs of each sample of one prompt."""
        sampling = SamplingParams(1.0, 1.0, -1, new_tokens, seed, (), ignore_eos=True)
        numbers, prompt_ids = tuple(range(samples)), np.asarray(prompt, np.uint32)
        request = GenerationRequest(str(seed), prompt_ids, numbers, sampling)
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in numbers]
        async with aclosing(self.engine.generate(request, every_token=False)) as stream:  # type: ignore[type-var]
            async for chunks in stream:
                for chunk in chunks:
                    tokens, logprobs = found[chunk.sample_index]
                    tokens += chunk.token_ids.tolist()
                    logprobs += chunk.behavior_logprobs.tolist()
        return found

    async def _one(self, name: str, prompt: np.ndarray, new_tokens: int) -> int:
        sampling = SamplingParams(1.0, 1.0, -1, new_tokens, 0, (), ignore_eos=True)
        request = GenerationRequest(name, prompt, (0,), sampling)
        async with aclosing(self.engine.generate(request, every_token=False)) as stream:  # type: ignore[type-var]
            return sum([chunk.behavior_logprobs.size async for all_ in stream for chunk in all_])


class _TransformersSide:
    """`generate` of a model with weights of its own, with the logprobs of sampled tokens."""

    layout: object = None

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        config = AutoConfig.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # no end tokens
        self._device = device
        self._model.eval().to(device)

    async def draw(self, prompts: np.ndarray, new_tokens: int) -> int:
        """Generate one batch, alone in this process; return the number of tokens."""
        torch = self._torch
        ids = torch.from_numpy(prompts.astype(np.int64)).to(self._device)
        # `output_scores` would keep the scores of all steps, a gigabyte of them. So the logprob of
        # each sampled token is taken when the next step shows it.
        logprobs: list[Any] = []
        last: list[Any] = []

        def note(input_ids: Any, scores: Any) -> Any:  # noqa: ANN401 - tensors
            if last:
                logprobs.append(last.pop().float().log_softmax(-1).gather(1, input_ids[:, -1:]))
            last.append(scores)
            return scores

        with torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                logits_processor=[note],
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new_tokens,
            )
            note(found, None)
        return sum(step.numel() for step in logprobs)


class Peer:
    """Its public methods are the operations."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._side: _EngineSide | _TransformersSide | None = None
        self._vocabulary = 0
        self._busy: asyncio.Task[None] | None = None
        self._bare: Any = None

    async def start(
        self,
        engine: str,
        folder: str,
        dtype: str,
        slots: int,
        tokens: int,
        device: str = "cpu",
        more: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Start an engine on a model folder, for samples of so many tokens; return its layout.

        `more` are overrides of the run's configuration.
        """
        config = await asyncio.to_thread((Path(folder) / "config.json").read_text, "utf-8")
        self._vocabulary = json.loads(config)["vocab_size"]
        if engine == TRANSFORMERS:
            self._side = _TransformersSide(folder, dtype, device)
        else:
            keys = (
                f"actor_rollout_ref.model.path={folder}",
                f"actor_rollout_ref.rollout.name={engine}",
                f"actor_rollout_ref.rollout.dtype={dtype}",
                f"actor_rollout_ref.rollout.max_num_seqs={slots}",
                f"actor_rollout_ref.rollout.max_model_len={tokens}",
                f"sluice.rollout.device={device}",
                "sluice.rollout.torch_threads=1",
                "sluice.rollout.batch_invariant=false",
                "sluice.weights.backend=gloo",
                *more,
            )
            made = create_engine(load_config(None, keys))
            await made.start()
            self._side = _EngineSide(made)
        return {"layout": self._side.layout}

    @property
    def _engine(self) -> Engine:
        assert isinstance(self._side, _EngineSide)
        return self._side.engine

    async def join(self, spec: dict[str, Any]) -> None:
        """Join a transfer group."""
        await self._engine.join_group(msgspec.convert(spec, TransferGroupSpec))

    async def stage(self, epoch: int, version: int, digest: bool = True) -> dict[str, Any]:
        """Stage an update; return its digest, which is nothing but zeros without `digest`."""
        if digest:
            return {"digest": (await self._engine.stage(epoch, version)).digest}
        with patch.object(transfer, "StreamDigest", NoDigest):
            return {"digest": (await self._engine.stage(epoch, version)).digest}

    async def commit(self, epoch: int, version: int, digest: str) -> dict[str, Any]:
        """Commit an update; return the seconds without a token for it."""
        return {"stall_s": await self._engine.commit(epoch, version, digest)}

    async def draw(self, sequences: int, new_tokens: int) -> dict[str, Any]:
        """Generate; return tokens and seconds."""
        assert self._side is not None
        prompts, began_s = self._prompts(sequences), time.perf_counter()
        tokens = await self._side.draw(prompts, new_tokens)
        return {"tokens": tokens, "seconds": time.perf_counter() - began_s}

    async def sample(
        self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Return tokens and logprobs of each sample, by prompt; seeds count up from `seed`."""
        assert isinstance(self._side, _EngineSide)
        side = self._side
        async with asyncio.TaskGroup() as tasks:
            sampled = [
                tasks.create_task(side.sample(prompt, samples, new_tokens, seed + number))
                for number, prompt in enumerate(prompts)
            ]
        return {"groups": [task.result() for task in sampled]}

    async def busy(self, sequences: int, new_tokens: int) -> None:
        """Generate until `quiet`; answered when all sequences run."""
        self._busy = self._tasks.create_task(self._keep_busy(sequences, new_tokens))
        async with asyncio.timeout(120):
            while self._engine.load().slots_busy < sequences:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """End what `busy` began."""
        if self._busy is not None:
            self._busy.cancel()
            await asyncio.wait([self._busy], timeout=60)
            self._busy = None

    async def meet(self, port: int, rank: int, size: int, num_bytes: int) -> None:
        """Join a default process group of torch.distributed, for `bare`."""
        import torch
        import torch.distributed as dist

        self._bare = torch.zeros(num_bytes, dtype=torch.uint8)
        address = f"tcp://127.0.0.1:{port}"
        await asyncio.to_thread(
            dist.init_process_group, "gloo", init_method=address, rank=rank, world_size=size
        )

    async def bare(self) -> None:
        """Receive one bare broadcast."""
        import torch.distributed as dist

        await asyncio.to_thread(dist.broadcast, self._bare, 0)

    async def close(self) -> None:
        """End the engine."""
        await self.quiet()
        if isinstance(self._side, _EngineSide):
            await self._side.engine.stop()

    async def _keep_busy(self, sequences: int, new_tokens: int) -> None:
        assert self._side is not None
        while True:
            await self._side.draw(self._prompts(sequences), new_tokens)

    def _prompts(self, sequences: int) -> np.ndarray:
        shape = (sequences, PROMPT_TOKENS)
        return np.random.default_rng(0).integers(2, self._vocabulary, shape).astype(np.uint32)


async def main() -> None:
    """Answer operations until the input ends."""
    async with asyncio.TaskGroup() as tasks:
        await serve(Peer(tasks))


if __name__ == "__main__":
    asyncio.run(main())
