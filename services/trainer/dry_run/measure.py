"""Count the bytes of one rank's step: build, shard, a pass for logprobs, an optimizer step, a
micro-batch.

It needs no peers: collectives of `FakeRanks` return at once and move nothing.
"""

from __future__ import annotations

import copy
import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from services.trainer.dry_run.live_bytes import LiveBytes
from services.trainer.learner.batch.micro_batch import MicroBatch, pack_rows
from services.trainer.learner.batch.packed_rows import TrainingRow
from services.trainer.learner.model.experts import Routing, expert_blocks, routing_tape
from services.trainer.learner.model.forward import (
    EntropyUse,
    TokenPass,
    hidden_states,
    token_outputs,
)
from services.trainer.learner.model.loading import (
    LoadedModel,
    Stage,
    build_policy,
    prepare_policy,
)
from services.trainer.learner.model.optimizer import ModelOptimizer, ShardedGradients
from services.trainer.learner.model.sharding import Shards
from services.trainer.learner.model.stages import keep_stage, own_stage
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, share_model
from services.trainer.learner.rank_rendezvous import RankAddress
from services.trainer.learner.ranks import ParallelContext, TorchDistributed
from services.trainer.learner.update.settings import update_settings
from sluice.config.derived import max_row_tokens
from sluice.config.parallel_layout import ParallelLayout
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.plan.dry_run import PassBytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

_CPU = torch.device("cpu")
_STEPS = 1
_NO_DEADLINE_S = 60.0


class FakeRanks(TorchDistributed):
    """Rank 0 of `world_size`, or its peer in another stage; a process has one group at a time."""

    def __init__(self, world_size: int) -> None:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that none is opened
        }
        super().__init__(select_device("cpu"), _NO_DEADLINE_S)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Return this rank's numbers for every rank."""
        return [list(values)] * self.world_size

    def divide(self, layout: ParallelLayout) -> None:
        with unset_fake_temporarily():  # groups are made of numbers
            super().divide(layout)
        # Do it now, because rank 0 is not in the meshes of another stage.
        self.shard_mesh(layout.shard)
        self.expert_mesh(layout.shard)

    def move_to(self, stage: int) -> None:
        """Move this rank to the same place in another stage, if there is one."""
        if self.stages is not None:
            self.stages = replace(self.stages, number=stage)

    def shard_mesh(self, size: int) -> DeviceMesh:
        with unset_fake_temporarily():
            return super().shard_mesh(size)

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        with unset_fake_temporarily():
            return super().expert_mesh(size)

    def _form(self, backend: str, place: RankAddress) -> None:
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=place.world_size)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors in the block fake, except the rank numbers in meshes."""
    mesh, init = DeviceMesh.mesh, DeviceMesh.__init__
    DeviceMesh.mesh = property(_outside_fake_mode(mesh.fget))  # type: ignore[assignment,method-assign,attr-defined]
    DeviceMesh.__init__ = _outside_fake_mode(init)  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        DeviceMesh.mesh, DeviceMesh.__init__ = mesh, init  # type: ignore[method-assign]


def _outside_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function's
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


def measure_passes(
    config: RunConfig, model: Mapping[str, object], parallel: TorchDistributed
) -> PassBytes:
    """Return the bytes of this rank's passes. Collective.

    Args:
        config: the run's configuration; the model's files are not read.
        model: the content of config.json; for `FakeRanks` with only the layers of their stage.
        parallel: all ranks, divided.
    """
    with LiveBytes() as count:
        pass_bytes = _Rank(config, model, parallel, count).run()
    gc.collect()
    return pass_bytes


class _Rank:
    def __init__(
        self,
        config: RunConfig,
        model: Mapping[str, object],
        parallel: TorchDistributed,
        count: LiveBytes,
    ) -> None:
        actor = config.actor_rollout_ref.actor
        self._config, self._count = config, count
        kind = AutoConfig.for_model(**cast("dict[str, Any]", copy.deepcopy(dict(model))))
        self._model = build_policy(
            kind, config.actor_rollout_ref.model, actor.fsdp_config, max_row_tokens(config.data)
        )
        is_plan = isinstance(parallel, FakeRanks)
        cut = None if is_plan else actor.megatron.override_transformer_config
        stage = own_stage(self._model, actor.fsdp_config, cut, parallel)
        prepare_policy(self._model, config.actor_rollout_ref, stage.layers.start if stage else 0)
        keep_stage(LoadedModel(self._model, total=0.0), stage)
        gc.collect()
        self._stage, self._tensor = stage, parallel.tensor
        if is_plan:
            plan_routing(self._model)
        # It is on the device already, and torch cannot move a fake parameter.
        self._model.to = lambda *_: self._model  # type: ignore[assignment]
        self._shards: Shards | None = share_model(
            LoadedModel(self._model, stage=stage),
            actor.fsdp_config,
            parallel,
            key=ACTOR_SHARDING,
            device=_CPU,
        )
        self._micro_batch = largest_micro_batch(config, parallel)
        named = dict(self._model.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._parameter_bytes = count.live
        gradients = None
        if self._shards is not None:
            gradients = ShardedGradients(list(trained.values()), parallel)
        self._optimizer = ModelOptimizer(trained, actor.optim, _STEPS, gradients)
        # The norm is a value, which fake tensors do not have.
        self._optimizer.gradients.norm = lambda: 0.0  # type: ignore[method-assign]
        self._entropy = EntropyUse.BONUS if actor.entropy_coeff else EntropyUse.METRIC

    def run(self) -> PassBytes:
        """Run the passes and return the bytes that they used."""
        count, parameters = self._count, self._parameter_bytes
        log_prob = self._log_prob()
        self._optimizer.gradients.complete()
        gradients = count.live - parameters
        count.reset()
        self._optimizer.step()
        step = count.peak
        self._optimizer.gradients.complete()
        moments = count.live - parameters - gradients
        forward, kept, backward, moved = self._passes()
        return PassBytes(
            parameters=parameters,
            gradients=gradients,
            moments=moments,
            log_prob=log_prob,
            kept=kept,
            forward=forward - moments,
            backward=backward - moments,
            step=step,
            moved=moved,
        )

    def _log_prob(self) -> int:
        self._count.reset()
        with torch.no_grad():
            self._outputs()
        if self._shards is not None:
            self._shards.reshard()
        return self._count.peak

    def _passes(self) -> tuple[int, int, int, dict[str, int]]:
        """Return the peak of the forward pass, the bytes that it keeps, the peak of the backward
        pass, and the bytes moved."""
        stage, shards = self._stage, self._shards
        # Micro-batches between their forward and their backward pass.
        num_in_flight = 1 if stage is None else stage.count - stage.number
        count = self._count
        if shards is not None and shards.sums_once:
            # Gradients are whole until the last micro-batch, which is alone, sums them.
            self._optimizer.gradients.zero()
            shards.sum_gradients(False)
            torch.autograd.backward(*self._forward())
        at_start = count.live
        waiting = self._forward()[0] if num_in_flight > 1 else None
        after_first = count.live
        count.reset()
        leaving, gradient = self._forward()
        moved = Counter(count.moved)
        after_second = count.live - gradient.nbytes
        # Further ones keep as much as the second: gathered weights exist only once.
        further = max(0, num_in_flight - 2) * (after_second - after_first)
        forward, kept = count.peak + further, after_second - at_start + further
        count.reset()
        if waiting is not None:
            torch.autograd.backward(waiting, gradient)
        backward = count.peak + further
        count.reset()
        if shards is not None:
            shards.sum_gradients(True)
        torch.autograd.backward(leaving, gradient)
        moved.update(count.moved)
        return forward, kept, max(backward, count.peak), dict(moved)

    def _forward(self) -> tuple[Tensor | GradientEdge, Tensor]:
        """Return the tensor or edge that a backward pass starts from, and its gradient."""
        outputs, stage = self._outputs(), self._stage
        if stage is None or stage.after is None:
            return outputs, torch.ones_like(outputs)
        # The output is sent, and not kept, while its gradient arrives.
        return get_gradient_edge(outputs), self._stage_input(stage)

    def _stage_input(self, stage: Stage) -> Tensor:
        """Return a tensor like those sent between stages."""
        tokens = self._micro_batch.input_ids.shape[1]
        tokens //= self._tensor.size if self._tensor else 1
        return torch.empty((1, tokens, stage.width), dtype=stage.dtype)

    def _outputs(self) -> Tensor:
        stage, tokens = self._stage, self._micro_batch.input_ids.shape[1]
        routing, entering = balanced_routing(self._model, tokens), None
        if stage is not None and stage.before is not None:
            entering = self._stage_input(stage).requires_grad_(torch.is_grad_enabled())
        token_pass = TokenPass(
            self._micro_batch,
            self._config.actor_rollout_ref.rollout.temperature,
            self._entropy,
            routing=routing,
        )
        if stage is not None and stage.after is not None:
            return hidden_states(self._model, token_pass, entering)
        return token_outputs(self._model, token_pass, entering).logprobs


def largest_micro_batch(config: RunConfig, parallel: ParallelContext) -> MicroBatch:
    """Return the largest micro-batch of the run, by tokens: rows of the longest length."""
    cut = update_settings(config, vocab_size=1).cut
    data, longest = config.data, max_row_tokens(config.data)
    if cut.token_budget is None:
        assert cut.rows_per_micro is not None
        lengths = [longest] * cut.rows_per_micro
    else:
        num_full, remainder = divmod(max(cut.token_budget, longest), longest)
        lengths = [longest] * num_full + ([remainder] if remainder > 1 else [])
    rows = [
        _row(number, 0 if cut.whole_groups else number, length, data.max_prompt_length)
        for number, length in enumerate(lengths)
    ]
    pad_to = math.lcm(cut.pad_to, parallel.token_multiple)
    return pack_rows(rows, _CPU, parallel.share, pad_to)


def _row(number: int, group: int, tokens: int, longest_prompt: int) -> TrainingRow:
    prompt = min(longest_prompt, tokens - 1)
    response = tokens - prompt
    return TrainingRow(
        number,
        group,
        np.zeros(prompt, np.uint32),
        np.zeros(response, np.uint32),
        np.zeros(response, np.float32),
    )


def balanced_routing(model: PreTrainedModel, tokens: int) -> Routing | None:
    """Return choices of experts for `tokens` packed tokens that load all experts evenly.

    Choices and counts are real tensors even among fake ones, because the host reads them.
    """
    blocks, tape = list(expert_blocks(model)), routing_tape(model)
    if tape is None or not blocks:
        return None
    tokens //= tape.tensor.size if tape.tensor else 1
    with unset_fake_temporarily():
        number = torch.arange(tokens * blocks[0].num_chosen) % blocks[0].num_experts
        experts = number.view(tokens, -1).to(torch.int16)
    return Routing(dict.fromkeys((block.layer for block in blocks), experts))


def plan_routing(model: PreTrainedModel) -> None:
    """Let a rank without peers receive from each peer what it sends to itself."""
    tape = routing_tape(model)
    if tape is None:
        return
    begin = tape.begin

    def begin_outside_fake_mode() -> None:
        with unset_fake_temporarily():
            begin()

    tape.begin = begin_outside_fake_mode  # type: ignore[method-assign]
    tape.receive = _receive_own_parts


def _receive_own_parts(parts: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)  # counted, but nothing comes
    return received.copy_(parts[dist.get_rank(group)].expand_as(parts))
