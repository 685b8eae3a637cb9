"""Run lists of micro-batches through a model: one by one, or through the stages of a pipeline
(docs/architecture.md, "Stages").

A pipeline runs one forward and one backward pass in turn (1F1B: Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"), without interleaving. Of
three stages and four micro-batches, forward 1-4, backward a-d:

    stage 1   1 2 3 . . a 4 b . c . d
    stage 2   . 1 2 . a 3 b 4 c . d
    stage 3   . . 1 a 2 b 3 c 4 d

A model without stages counts as first and last stage. A rank sends its own part of the tokens to
the ranks with its place in the neighboring stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from services.trainer.learner.batch.micro_batch import MicroBatch, pack_rows
from services.trainer.learner.batch.packed_rows import TrainingRow
from services.trainer.learner.model.experts import Routing, expert_blocks, routing_tape
from services.trainer.learner.model.forward import (
    TokenPass,
    hidden_states,
    response_values,
    token_outputs,
)
from services.trainer.learner.model.loading import Stage
from services.trainer.learner.model.sharding import Shards
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.token_statistics import TokenStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Outputs = TypeVar("Outputs", TokenStatistics, Tensor)
"""The output of a pass on the last stage: statistics of a policy's tokens, or a critic's values."""
Read: TypeAlias = Callable[[int, Outputs], None]
Loss: TypeAlias = Callable[[int, Outputs], Tensor]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A micro-batch between its forward and its backward pass on this stage."""

    entering: Tensor | None
    leaving: GradientEdge  # without the output, whose memory is freed once it is sent
    routing: Routing | None


class Passes(ABC, Generic[Outputs]):
    """Runs lists of passes of one model, the same number on every rank. Collective.

    Each pass of a sharded model gathers its layers from all ranks, and each stage waits for the one
    before. So a rank with fewer micro-batches than the busiest one adds idle passes over a dummy
    row, with gradient 0. Ranks that hold a whole model add none.

    Args:
        model: a whole or sharded model, or a stage of it.
        shards: the model's shards; ``None`` if this rank holds it whole.
        device: gets the inputs of idle passes.
        stage: this rank's stage; ``None`` without a pipeline.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shards: Shards | None,
        parallel: ParallelContext,
        device: torch.device,
        stage: Stage | None = None,
    ) -> None:
        self._model, self._shards, self._stage = model, shards, stage
        self._parallel, self._device = parallel, device
        self._before, self._after = (None, None) if stage is None else (stage.before, stage.after)
        self._num_passes = self._num_left = 0
        self._idle_routings: Iterator[Routing] = iter(())  # if others replay
        self._tape = routing_tape(model)
        if self._tape is not None:
            # None if all its layers are dense.
            layers = [block.layer for block in expert_blocks(model)]
            self._tape.local_layers = slice(layers[0], layers[-1] + 1) if layers else slice(0)

    @abstractmethod
    def _run_last(self, token_pass: TokenPass, entering: Tensor | None) -> Outputs:
        """Run the last stage; `entering` is the output of the stage before, if any."""

    def begin(self, num_passes: int) -> None:
        """Prepare for `num_passes` passes, either without gradients or of one optimizer step."""
        self._idle_routings = iter(())
        # `_num_left` counts down to the pass that sums gradients; the busiest rank sets the number.
        self._num_passes = num_passes
        self._num_left = 0 if self._shards is None else self._max_count(num_passes)

    @property
    def num_idle(self) -> int:
        """Return how many idle passes this rank adds; call it before the passes begin."""
        return max(0, self._num_left - self._num_passes)

    def follow_idle(self, routings: Iterable[Routing]) -> None:
        """Set the routings of the idle passes, in order."""
        self._idle_routings = iter(routings)

    @torch.no_grad()
    def forward(self, passes: Sequence[TokenPass], read: Read[Outputs]) -> None:
        """Run passes without gradients, as many as `begin` was given.

        Args:
            read: gets the number and outputs of each pass; in a pipeline only on the last stage.
        """

        def read_own(number: int, outputs: Outputs) -> None:
            if number < len(passes):
                read(number, outputs)

        with_idle = [*passes, *self._idle_passes()]
        for number, token_pass in enumerate(with_idle):
            leaving = self._forward(
                token_pass, self._receive(with_idle, number), partial(read_own, number)
            )
            if leaving is not None:
                self._exchange(f"micro-batch {number + 1} of {len(with_idle)}", leaving, None)
        if self._shards is not None:
            self._shards.reshard()

    def train(self, passes: Sequence[TokenPass], loss: Loss[Outputs]) -> None:
        """Run the passes of one optimizer step forward and backward; gradients add up.

        Args:
            passes: this rank's passes, as many as `begin` was given.
            loss: returns the loss of a pass from its number and outputs; in a pipeline called only
                on the last stage.
        """

        def loss_or_zero(number: int, outputs: Outputs) -> Tensor:
            return loss(number, outputs) if number < len(passes) else _zero_loss(outputs)

        self._run_all([*passes, *self._idle_passes()], loss_or_zero)

    def _run_all(self, passes: Sequence[TokenPass], loss: Loss[Outputs]) -> None:
        """Run all passes; see the time line above."""
        stage, count = self._stage, len(passes)
        in_flight: deque[_InFlight] = deque()
        warmup = 0 if stage is None else min(stage.count - 1 - stage.number, count)

        def forward(number: int, entering: Tensor | None) -> Tensor:
            """Return the output, without keeping a reference to it."""
            if entering is not None:
                entering.requires_grad_()
            leaving = self._forward(passes[number], entering, partial(loss, number))
            routing = None if self._tape is None else self._tape.current
            in_flight.append(_InFlight(entering, get_gradient_edge(leaving), routing))
            return leaving.detach()

        def backward(gradient: Tensor | None) -> Tensor | None:
            return self._backward(in_flight.popleft(), gradient)

        for number in range(warmup):
            self._exchange(
                f"micro-batch {number + 1} of {count}",
                forward(number, self._receive(passes, number)),
                None,
            )
        entering = self._receive(passes, warmup)
        for number in range(warmup, count):
            gradient = self._swap_next(passes, forward(number, entering), number, number - warmup)
            entering = self._swap_previous(passes, backward(gradient), number - warmup, number + 1)
            del gradient  # the next forward pass needs the memory
        for number in range(count - warmup, count):
            gradient = self._swap_next(passes, None, None, number)
            self._swap_previous(passes, backward(gradient), number, None)

    def _idle_passes(self) -> list[TokenPass]:
        return [
            TokenPass(
                idle_micro_batch(self._device, self._parallel),
                routing=next(self._idle_routings, None),
            )
            for _ in range(self.num_idle)
        ]

    def _max_count(self, num_passes: int) -> int:
        gathered = self._parallel.all_gather([float(num_passes)], "counting micro-batches")
        return int(max(count for (count,) in gathered))

    def _forward(
        self, token_pass: TokenPass, entering: Tensor | None, finish: Callable[[Outputs], Made]
    ) -> Tensor | Made:
        """Return the input of the next stage; on the last stage, what `finish` returns."""
        if self._after is None:
            return finish(self._run_last(token_pass, entering))
        return hidden_states(self._model, token_pass, entering)

    def _backward(self, in_flight: _InFlight, gradient: Tensor | None) -> Tensor | None:
        if self._shards is not None:
            # Earlier passes keep whole gradients: summing once per step saves communication.
            self._num_left -= 1
            self._shards.sum_gradients(self._num_left == 0)
        if self._tape is not None and in_flight.routing is not None:
            # A recomputed layer must follow the choices of its own pass, not of a later one.
            self._tape.current = in_flight.routing
        # Adds to earlier micro-batches' gradients.
        torch.autograd.backward(in_flight.leaving, gradient)
        return None if in_flight.entering is None else in_flight.entering.grad

    def _receive(self, passes: Sequence[TokenPass], number: int) -> Tensor | None:
        return self._swap_previous(passes, None, None, number)

    def _swap_previous(
        self,
        passes: Sequence[TokenPass],
        gradient: Tensor | None,
        gradient_of: int | None,
        received_number: int | None,
    ) -> Tensor | None:
        """Send the gradient of one micro-batch's input, and receive another one's input."""
        if self._before is None:
            return None
        entering = None
        if received_number is not None and received_number < len(passes):
            entering = self._buffer(passes[received_number])
        micro_batch = None if entering is None else received_number
        content = _describe(len(passes), gradient_of=gradient_of, micro_batch=micro_batch)
        self._exchange(content, gradient, entering, backwards=True)
        return entering

    def _swap_next(
        self,
        passes: Sequence[TokenPass],
        leaving: Tensor | None,
        micro_batch: int | None,
        received_number: int,
    ) -> Tensor | None:
        """Send one micro-batch's output, and receive the gradient of another one's."""
        if self._after is None:
            return None
        gradient = self._buffer(passes[received_number])
        content = _describe(len(passes), gradient_of=received_number, micro_batch=micro_batch)
        self._exchange(content, leaving, gradient)
        return gradient

    def _exchange(
        self, content: str, sent: Tensor | None, received: Tensor | None, *, backwards: bool = False
    ) -> None:
        stage, peer = self._stage, self._before if backwards else self._after
        assert stage is not None
        assert peer is not None
        peer_stage = stage.number + (-1 if backwards else 1)
        stages = f"stages {stage.number + 1} and {peer_stage + 1} of {stage.count}"
        self._parallel.exchange(
            [] if sent is None else [(sent.contiguous(), peer)],
            [] if received is None else [(received, peer)],
            f"exchanging {content} between {stages}",
        )

    def _buffer(self, token_pass: TokenPass) -> Tensor:
        assert self._stage is not None
        tokens, tensor = token_pass.micro_batch.input_ids.shape[1], self._parallel.tensor
        if tensor is not None:
            tokens //= tensor.size
        return torch.empty(
            (1, tokens, self._stage.width), dtype=self._stage.dtype, device=self._device
        )


class TokenPasses(Passes[TokenStatistics]):
    """Passes of a policy."""

    def _run_last(self, token_pass: TokenPass, entering: Tensor | None) -> TokenStatistics:
        return token_outputs(self._model, token_pass, entering)


class ValuePasses(Passes[Tensor]):
    """Passes of a critic; each computes the values [N] of its micro-batch."""

    def _run_last(self, token_pass: TokenPass, entering: Tensor | None) -> Tensor:
        return response_values(self._model, token_pass.micro_batch, entering)


def idle_micro_batch(device: torch.device, parallel: ParallelContext) -> MicroBatch:
    """Return a micro-batch of one row: a prompt of one token and a response of one token."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    return pack_rows([row], device, parallel.share, parallel.token_multiple)


def _zero_loss(outputs: TokenStatistics | Tensor) -> Tensor:
    # Times 0: an idle pass takes part in the sums over ranks and adds nothing to them.
    return (outputs if isinstance(outputs, Tensor) else outputs.logprobs).sum() * 0.0


def _describe(count: int, *, gradient_of: int | None, micro_batch: int | None) -> str:
    parts = [] if micro_batch is None else [f"micro-batch {micro_batch + 1}"]
    parts += [] if gradient_of is None else [f"the gradient of micro-batch {gradient_of + 1}"]
    return f"{' and '.join(parts)} of {count}"
