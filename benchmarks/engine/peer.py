"""One side of `make bench-engine`: an engine, or transformers `generate`, steered by JSON lines.

``python -m benchmarks.engine.peer`` in an environment that has the engine. Operations: ``start``
(engine, model folder, dtype, device, sequences at once, tokens of a sample), ``join`` (spec),
``stage`` (epoch, version), ``commit`` (epoch, version, digest), ``draw`` (sequences, new tokens; it
tells tokens and seconds), ``busy`` (draws until ``quiet``), ``load`` (busy slots) and ``bandwidth``
(of the device). Each is answered by one line when it is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import numpy as np

from services.rollout.engines.protocol import Engine, GenerationRequest
from services.rollout.engines.registry import create_engine
from sluice.config.loading.loader import load_config
from sluice.types import SamplingParams, TransferGroupSpec

PROMPT_TOKENS = 20
TRANSFORMERS = "hf"
_COPIED_BYTES = 1 << 30


class Side(Protocol):
    """A side that generates tokens."""

    @property
    def layout(self) -> object:
        """The weights to send to it; nothing if it has some."""
        ...

    async def draw(self, prompts: np.ndarray, new_tokens: int) -> int:
        """Generate one sample for each prompt; return the number of tokens that came with a
        logprob.
        """
        ...


class EngineSide:
    """An engine behind the Protocol, made as a replica makes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def layout(self) -> object:
        """The engine's."""
        return msgspec.to_builtins(tuple(self.engine.weight_layout))

    async def draw(self, prompts: np.ndarray, new_tokens: int) -> int:
        """Make one call a prompt, as the reward service does."""
        async with asyncio.TaskGroup() as tasks:
            sampled = [
                tasks.create_task(self._one(str(number), prompt, new_tokens))
                for number, prompt in enumerate(prompts)
            ]
        return sum(task.result() for task in sampled)

    async def _one(self, name: str, prompt: np.ndarray, new_tokens: int) -> int:
        sampling = SamplingParams(1.0, 1.0, -1, new_tokens, 0, (), True)
        request = GenerationRequest(name, prompt, (0,), sampling)
        async with aclosing(self.engine.generate(request, every_token=False)) as stream:  # type: ignore[type-var]
            return sum([chunk.behavior_logprobs.size async for all_ in stream for chunk in all_])


class _LogprobRecorder:
    """Records the logprob of each sampled token when the next step shows it.

    `output_scores` would keep the scores of all steps, a gigabyte of them.
    """

    def __init__(self) -> None:
        self.steps: list[np.ndarray] = []
        self._scores: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ANN401 - tensors
        """Take a step of `generate`: its tokens so far and the scores of the next one."""
        self.note(input_ids)
        self._scores = scores
        return scores

    def note(self, input_ids: Any) -> None:  # noqa: ANN401
        """Record the last token of each row from the scores of the step before."""
        if self._scores is not None:
            logprobs = self._scores.float().log_softmax(-1).gather(1, input_ids[:, -1:])
            self.steps.append(logprobs.cpu().numpy())


class TransformersSide:
    """`generate` of a model with weights of its own, with the logprobs of sampled tokens."""

    layout: object = None

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
        )
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # no end tokens
        self._model.to(device).eval()

    async def draw(self, prompts: np.ndarray, new_tokens: int) -> int:
        """Generate one batch, alone in this process."""
        torch, model = self._torch, self._model
        ids = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
        with torch.inference_mode():
            recorder = _LogprobRecorder()
            found = model.generate(
                input_ids=ids,
                logits_processor=[recorder],
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new_tokens,
            )
            recorder.note(found)
        return sum(logprobs.size for logprobs in recorder.steps)


class _Peer:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._side: Side | None = None
        self._device, self._vocabulary = "cpu", 0
        self._busy: asyncio.Task[None] | None = None

    async def run(self, command: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] | None = await getattr(self, command.pop("op"))(**command)
        return answer or {}

    async def start(
        self, engine: str, folder: str, dtype: str, device: str, slots: int, tokens: int
    ) -> dict[str, Any]:
        self._device = device
        config = await asyncio.to_thread((Path(folder) / "config.json").read_text, "utf-8")
        self._vocabulary = json.loads(config)["vocab_size"]
        if engine == TRANSFORMERS:
            self._side = TransformersSide(folder, dtype, device)
        else:
            made = create_engine(
                load_config(None, _keys(engine, folder, dtype, device, slots, tokens))
            )
            await made.start()
            self._side = EngineSide(made)
        return {"layout": self._side.layout}

    @property
    def _engine(self) -> Engine:
        assert isinstance(self._side, EngineSide)
        return self._side.engine

    async def join(self, spec: dict[str, Any]) -> None:
        await self._engine.join_group(msgspec.convert(spec, TransferGroupSpec))

    async def stage(self, epoch: int, version: int) -> dict[str, Any]:
        return {"digest": (await self._engine.stage(epoch, version)).digest}

    async def commit(self, epoch: int, version: int, digest: str) -> dict[str, Any]:
        return {"stall_s": (await self._engine.commit(epoch, version, digest)).stall_s}

    async def draw(self, sequences: int, new_tokens: int) -> dict[str, Any]:
        assert self._side is not None
        prompts = self._prompts(sequences)
        began_s = time.perf_counter()
        tokens = await self._side.draw(prompts, new_tokens)
        return {"tokens": tokens, "seconds": time.perf_counter() - began_s}

    async def busy(self, sequences: int, new_tokens: int) -> None:
        self._busy = self._tasks.create_task(self._keep_busy(sequences, new_tokens))

    async def load(self) -> dict[str, Any]:
        return {"slots_busy": self._engine.load().slots_busy}

    async def _keep_busy(self, sequences: int, new_tokens: int) -> None:
        assert self._side is not None
        while True:
            await self._side.draw(self._prompts(sequences), new_tokens)

    async def quiet(self) -> None:
        if self._busy is not None:
            self._busy.cancel()
            await asyncio.wait([self._busy], timeout=60)
            self._busy = None

    async def bandwidth(self) -> dict[str, Any]:
        return {"bytes_per_s": _bytes_per_s(self._device)}

    async def close(self) -> None:
        await self.quiet()
        if isinstance(self._side, EngineSide):
            await self._side.engine.stop()

    def _prompts(self, sequences: int) -> np.ndarray:
        shape = (sequences, PROMPT_TOKENS)
        return np.random.default_rng(0).integers(2, self._vocabulary, shape).astype(np.uint32)


def _keys(
    engine: str, folder: str, dtype: str, device: str, slots: int, tokens: int
) -> tuple[str, ...]:
    """Return a replica's configuration."""
    return (
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        f"actor_rollout_ref.rollout.max_num_seqs={slots}",
        f"actor_rollout_ref.rollout.max_model_len={tokens}",
        f"sluice.rollout.device={device}",
        "sluice.rollout.torch_threads=1",
        "sluice.rollout.batch_invariant=false",
        "sluice.weights.backend=gloo",
    )


def _bytes_per_s(device: str) -> float:
    """Return bytes read and written by copies within the device's memory; the best of several."""
    import torch

    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        _finish(device)
        began_s = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _COPIED_BYTES / best_s


def _finish(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _own_output() -> TextIO:
    """Keep standard output for answers: what engines print goes to the errors."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


async def main() -> None:
    """Answer operations until the input ends."""
    answers = _own_output()
    async with asyncio.TaskGroup() as tasks:
        peer = _Peer(tasks)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                answers.write(json.dumps(await peer.run(json.loads(line))) + "\n")
                answers.flush()
        finally:
            await peer.close()


if __name__ == "__main__":
    asyncio.run(main())
