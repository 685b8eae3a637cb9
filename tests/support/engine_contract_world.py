"""The world of the engine contract: one running engine, two sets of weights, a trainer, and calls.

An adapter's test module gives the engine (`EngineFactory`) and a view inside (`Insight`). Weights
come over the real wire, so the suite knows nothing else of the adapter beyond the Protocol.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from services.rollout.engines.protocol import Engine, EngineLoad, GenerationRequest, SampleChunk
from sluice.device.select import select_device
from sluice.errors import NotReadyError
from sluice.types import SamplingParams, TransferGroupSpec
from sluice.weight_share import WHOLE
from sluice.weights.sender import WeightSender
from tests.support.causal_lms import (
    EOS,
    VOCABULARY,
    Samples,
    expected_logprobs,
    reference_model,
    request,
    samples_of,
)
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

SLOTS, MAX_MODEL_LEN = 128, 2048
TIED, UNTIED = "qwen3", "llama"
FAMILIES = (TIED, UNTIED)
EXPERTS = "qwen3_moe"
"""A mixture of experts, whose weights transformers holds fused and vendors know one by one."""
EngineFactory = Callable[[Path], Engine]
"""Makes an engine for a folder with a configuration: `SLOTS` samples at once of `MAX_MODEL_LEN`
tokens, float32, on the CPU, which recomputes caches after a swap."""


class Insight(Protocol):
    """What the Protocol does not tell of a started engine."""

    async def running_samples(self) -> int:
        """Samples that the step loop itself holds, as of its last step."""
        ...


InsightFactory = Callable[[Any], Insight]

_ARCHITECTURES = {
    TIED: "Qwen3ForCausalLM",
    UNTIED: "LlamaForCausalLM",
    EXPERTS: "Qwen3MoeForCausalLM",
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def save_contract_config(family: str, directory: Path, *, key_value_heads: int = 1) -> Path:
    """A configuration that every engine can run; heads of 64 are the smallest some can."""
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=family == TIED,
        eos_token_id=EOS,
        bos_token_id=0,
        pad_token_id=0,
        architectures=[_ARCHITECTURES[family]],
        **(_EXPERTS if family == EXPERTS else {}),
    )
    config.save_pretrained(directory)
    return directory


def save_contract_checkpoint(family: str, directory: Path, *, key_value_heads: int = 1) -> Path:
    """The same configuration with the weights of a world's `second`."""
    save_contract_config(family, directory, key_value_heads=key_value_heads)
    reference_model(directory, seed=2).save_pretrained(directory)
    return directory


@dataclass(slots=True, eq=False)
class Trainer:
    """The sending end of the weight wire, in threads of this process."""

    engine: Engine
    sender: WeightSender
    ranks: int = 1
    epoch: int = 0
    version: int = 0
    received_bytes: int = 0
    _never: threading.Event = field(default_factory=threading.Event)

    async def form(self) -> TransferGroupSpec:
        """Begins the next epoch."""
        self.epoch += 1
        layout = tuple(self.engine.weight_layout)
        specs = self.sender.form_group(
            self.epoch,
            ["replica"],
            layout,
            {"replica": self.engine.weight_shares or (WHOLE,) * self.ranks},
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(self.sender.join, self._never))
            joined = tasks.create_task(self.engine.join_group(specs["replica"]))
        assert joined.result() == specs["replica"].plan_digest
        return specs["replica"]

    async def stage(self, model: PreTrainedModel) -> str:
        """Broadcasts the model as the next version; returns the digest the engine computed.

        `received_bytes` is then what the worker with the most has received of it.
        """
        if self.epoch == 0:
            await self.form()
        self.version += 1
        state = model.state_dict()
        weights = {spec.name: state[spec.name] for spec in self.engine.weight_layout}
        buffer = buffer_of(weights)
        async with asyncio.TaskGroup() as tasks:
            sent = tasks.create_task(
                asyncio.to_thread(self.sender.broadcast, buffer, self.version, self._never)
            )
            staged = tasks.create_task(self.engine.stage(self.epoch, self.version))
        assert staged.result().version == self.version
        assert {staged.result().digest} == {*sent.result().digests.values()}
        if not self.engine.weight_shares:
            assert staged.result().digest == plain_digest(weights)
        self.received_bytes = staged.result().received_bytes
        return staged.result().digest

    async def publish(self, model: PreTrainedModel) -> None:
        """Has the model serve as the next version."""
        digest = await self.stage(model)
        await self.engine.commit(self.epoch, self.version, digest)


@dataclass(slots=True, eq=False)
class ContractWorld:
    """A running engine that serves `first`, unless a rule published something else."""

    folder: Path
    engine: Engine
    first: PreTrainedModel
    second: PreTrainedModel
    trainer: Trainer
    insight: Insight
    serving: PreTrainedModel | None = None

    async def serve(self, model: PreTrainedModel) -> None:
        """Publishes the model, if it does not serve."""
        if self.serving is not model:
            self.serving = None
            await self.trainer.publish(model)
            self.serving = model


@asynccontextmanager
async def contract_world(
    folder: Path,
    make_engine: EngineFactory,
    look_into: InsightFactory,
    *,
    ranks: int = 1,
    sender: str = "cpu",
) -> AsyncIterator[ContractWorld]:
    """A started engine, of so many devices, for the configuration in `folder`.

    Its weights come from the device called `sender`; without the first it refuses to sample. Or it
    serves those of a checkpoint in the folder (`save_contract_checkpoint`).
    """
    engine = make_engine(folder)
    source = WeightSender(device=select_device(sender), bucket_bytes=1 << 16, timeout_s=30.0)
    await engine.start()
    try:
        first, second = reference_model(folder, seed=1), reference_model(folder, seed=2)
        serving = None if engine.load().version is None else second
        if serving is None:
            with pytest.raises(NotReadyError):
                await generate(engine, request())
        trainer = Trainer(engine, source, ranks)
        yield ContractWorld(folder, engine, first, second, trainer, look_into(engine), serving)
    finally:
        await engine.stop()
        source.close()


TOLERANCE = 1e-4
ENDLESS = MAX_MODEL_LEN - 200
WAIT_S = 120
BATCH = SLOTS // 16
"""Slots that an engine may wait for before it fills them."""
PROMPTS = ([5], [5, 9, 23, 54], list(range(8, 48)), [3, 3, 3, 90, 91, 92, 17])
PLAIN = SamplingParams(1.0, 1.0, -1, 1, 0)


async def chunks_of(
    engine: Engine,
    wanted: GenerationRequest,
    *,
    every_token: bool = False,
    interval_s: float | None = None,
) -> list[SampleChunk]:
    """All chunks of a request, in order."""
    stream = engine.generate(wanted, every_token=every_token, partial_interval_s=interval_s)
    async with asyncio.timeout(WAIT_S), aclosing(stream) as all_chunks:
        return [chunk async for chunks in all_chunks for chunk in chunks]


async def generate(engine: Engine, wanted: GenerationRequest) -> Samples:
    """Runs a request to its end."""
    return samples_of(await chunks_of(engine, wanted))


def num_tokens(chunks: Iterable[SampleChunk]) -> int:
    """The tokens in all chunks."""
    return sum(int(chunk.token_ids.size) for chunk in chunks)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def settled(engine: Engine, before: EngineLoad) -> EngineLoad:
    """The load once no more tokens are on their way than were `before`.

    What was sampled when a call ended may still be on its way to the event loop.
    """
    async with asyncio.timeout(WAIT_S):
        while (load := await engine.check_alive()).running_tokens != before.running_tokens:
            pass
    return load


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the most likely one of a full forward pass, or as likely as that."""
    best = expected_logprobs(model, prompt, tokens, PLAIN)
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return np.allclose(logits.log_softmax(-1).max(-1).values.numpy(), best, atol=TOLERANCE)
