"""Lists of micro-batches through a model: one by one, or through the stages of a pipeline.

A pipeline runs one forward and one backward pass in turn (1F1B: Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"), without interleaving. Of
three stages and four micro-batches, forward 1-4, backward a-d:

    stage 1   1 2 3 . . a 4 b . c . d
    stage 2   . 1 2 . a 3 b 4 c . d
    stage 3   . . 1 a 2 b 3 c 4 d

Micro-batches have unequal lengths. All ranks of a pipeline pack the same rows, so each knows the
shape of what it gets. What travels is a rank's own part of the tokens: a rank talks to the ranks
that have its place in the neighboring stages. The loss is computed on the last stage, and what
later steps need of it they get as tables and metrics of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.model.experts import Routing, expert_blocks, routing_tape
from services.trainer.learner.model.forward import EntropyUse, hidden_states, token_outputs
from services.trainer.learner.model.loading import Stage
from services.trainer.learner.model.sharding import EvenPasses, Shards, idle_micro_batch
from services.trainer.learner.ranks import DataParallel
from sluice.algorithm.token_statistics import TokenStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read: TypeAlias = Callable[[int, TokenStatistics], None]
Loss: TypeAlias = Callable[[int, TokenStatistics], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPass:
    """What a pass computes; the arguments of `token_outputs`."""

    micro_batch: MicroBatch
    temperature: float
    entropy: EntropyUse = EntropyUse.NONE
    with_sum_pi_squared: bool = False
    routing: Routing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A micro-batch between its forward and its backward pass on this stage."""

    entering: Tensor | None
    leaving: GradientEdge  # without the output, whose memory is free when it is sent
    routing: Routing | None


class TokenPasses:
    """Runs lists of passes of one model, equally many on every rank. Collective.

    Args:
        model: whole, sharded, or a stage of it.
        shards: of the model; ``None``: this rank holds it whole.
        parallel: all ranks.
        device: gets the inputs of idle passes.
        stage: this rank's; ``None``: there is no pipeline.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shards: Shards | None,
        parallel: DataParallel,
        device: torch.device,
        stage: Stage | None = None,
    ) -> None:
        self._model, self._shards, self._parallel = model, shards, parallel
        self._device = device
        self._even = EvenPasses(shards, parallel, self._idle_pass, device)
        self._pipeline = None if stage is None else _Pipeline(model, stage, parallel, device)
        self._idle_routings: Iterator[Routing] = iter(())  # where other ranks' passes follow one

    def begin(self, own: int) -> None:
        """Prepare for `own` passes; see `EvenPasses.begin`."""
        self._idle_routings = iter(())
        self._even.begin(own)

    @property
    def num_idle(self) -> int:
        """Return how many idle passes this rank adds to its own ones, before they begin."""
        return self._even.num_idle

    def follow_idle(self, routings: Iterable[Routing]) -> None:
        """Give the idle passes their routings, in order."""
        self._idle_routings = iter(routings)

    @torch.no_grad()
    def forward(self, passes: Sequence[TokenPass], read: Read) -> None:
        """Run passes without gradients, as many as `begin` was given.

        Args:
            passes: of this rank.
            read: gets the number and the results of each; of a pipeline on the last stage only.
        """
        if self._pipeline is None:
            for number, one in enumerate(passes):
                read(number, _outputs(self._model, one))
            self._even.end_forward_only()
            return

        def read_own(number: int, outputs: TokenStatistics) -> None:
            if number < len(passes):
                read(number, outputs)

        self._pipeline.forward([*passes, *self._idle()], read_own)
        if self._shards is not None:
            self._shards.reshard()

    def train(self, passes: Sequence[TokenPass], loss: Loss) -> None:
        """Run the passes of one optimizer step forward and backward; gradients add up.

        Args:
            passes: of this rank, as many as `begin` was given.
            loss: returns the loss of a pass by its number and results; of a pipeline it is called
                on the last stage only.
        """
        if self._pipeline is None:
            for number, one in enumerate(passes):
                total = loss(number, _outputs(self._model, one))
                self._even.before_backward()
                total.backward()  # adds to the gradients of earlier micro-batches
            self._even.end_step()
            return

        def loss_or_zero(number: int, outputs: TokenStatistics) -> Tensor:
            # Times 0: an idle pass takes part in the sums over ranks and adds nothing to them.
            return loss(number, outputs) if number < len(passes) else outputs.logprobs.sum() * 0.0

        self._pipeline.train([*passes, *self._idle()], loss_or_zero, self._even.before_backward)

    def _idle(self) -> list[TokenPass]:
        return [
            TokenPass(
                idle_micro_batch(self._device, self._parallel),
                1.0,
                routing=next(self._idle_routings, None),
            )
            for _ in range(self._even.num_idle)
        ]

    def _idle_pass(self, micro_batch: MicroBatch) -> Tensor:
        routing = next(self._idle_routings, None)
        return _outputs(self._model, TokenPass(micro_batch, 1.0, routing=routing)).logprobs


class _Pipeline:
    def __init__(
        self,
        model: PreTrainedModel,
        stage: Stage,
        parallel: DataParallel,
        device: torch.device,
    ) -> None:
        self._model, self._stage = model, stage
        self._parallel, self._device = parallel, device
        self._tape = routing_tape(model)
        if self._tape is not None and (own := [one.layer for one in expert_blocks(model)]):
            self._tape.own = slice(own[0], own[-1] + 1)

    def forward(self, passes: Sequence[TokenPass], read: Read) -> None:
        for number, one in enumerate(passes):
            found = self._forward(one, self._received(passes, number))
            if isinstance(found, TokenStatistics):
                read(number, found)
            else:
                self._exchange(f"micro-batch {number + 1} of {len(passes)}", found, None)

    def train(
        self, passes: Sequence[TokenPass], loss: Loss, before_backward: Callable[[], None]
    ) -> None:
        stage, count = self._stage, len(passes)
        flight: deque[_InFlight] = deque()
        warm = min(stage.count - 1 - stage.number, count)

        def forward(number: int, entering: Tensor | None) -> Tensor:
            """Return the output, which nothing else keeps."""
            if entering is not None:
                entering.requires_grad_()
            found = self._forward(passes[number], entering)
            leaving = loss(number, found) if isinstance(found, TokenStatistics) else found
            routing = None if self._tape is None else self._tape.current
            flight.append(_InFlight(entering, get_gradient_edge(leaving), routing))
            return leaving.detach()

        def backward(gradient: Tensor | None) -> Tensor | None:
            before_backward()
            return self._backward(flight.popleft(), gradient)

        for number in range(warm):
            self._exchange(
                f"micro-batch {number + 1} of {count}",
                forward(number, self._received(passes, number)),
                None,
            )
        entering = self._received(passes, warm)
        for number in range(warm, count):
            gradient = self._swapped_after(passes, forward(number, entering), number, number - warm)
            entering = self._swapped_before(passes, backward(gradient), number - warm, number + 1)
            del gradient  # the next forward pass needs the memory
        for number in range(count - warm, count):
            gradient = self._swapped_after(passes, None, None, number)
            self._swapped_before(passes, backward(gradient), number, None)

    def _forward(self, one: TokenPass, entering: Tensor | None) -> Tensor | TokenStatistics:
        if self._stage.after is None:
            return _outputs(self._model, one, entering)
        return hidden_states(self._model, one.micro_batch, entering, one.routing)

    def _backward(self, one: _InFlight, gradient: Tensor | None) -> Tensor | None:
        if self._tape is not None and one.routing is not None:
            # A layer that is recomputed follows the choices of its own pass, not of a later one's.
            self._tape.current = one.routing
        torch.autograd.backward(one.leaving, gradient)
        return None if one.entering is None else one.entering.grad

    def _received(self, passes: Sequence[TokenPass], number: int) -> Tensor | None:
        return self._swapped_before(passes, None, None, number)

    def _swapped_before(
        self,
        passes: Sequence[TokenPass],
        gradient: Tensor | None,
        of: int | None,
        wanted: int | None,
    ) -> Tensor | None:
        """Send the gradient of one micro-batch's input, and receive another one's input."""
        if self._stage.before is None:
            return None
        entering = None
        if wanted is not None and wanted < len(passes):
            entering = self._buffer(passes[wanted])
        what = _named(len(passes), gradient_of=of, micro_batch=None if entering is None else wanted)
        self._exchange(what, gradient, entering, backwards=True)
        return entering

    def _swapped_after(
        self,
        passes: Sequence[TokenPass],
        leaving: Tensor | None,
        of: int | None,
        wanted: int,
    ) -> Tensor | None:
        """Send one micro-batch's output, and receive the gradient of another one's."""
        if self._stage.after is None:
            return None
        gradient = self._buffer(passes[wanted])
        what = _named(len(passes), gradient_of=wanted, micro_batch=of)
        self._exchange(what, leaving, gradient)
        return gradient

    def _exchange(
        self, what: str, sent: Tensor | None, received: Tensor | None, *, backwards: bool = False
    ) -> None:
        stage = self._stage
        peer, other = (stage.before, -1) if backwards else (stage.after, 1)
        assert peer is not None
        self._parallel.exchange(
            [] if sent is None else [(sent.contiguous(), peer)],
            [] if received is None else [(received, peer)],
            f"exchanging {what} between stages {stage.number + 1} and {stage.number + other + 1} "
            f"of {stage.count}",
        )

    def _buffer(self, one: TokenPass) -> Tensor:
        tokens, tensor = one.micro_batch.input_ids.shape[1], self._parallel.tensor
        if tensor is not None:
            tokens //= tensor.size
        return torch.empty(
            (1, tokens, self._stage.width), dtype=self._stage.dtype, device=self._device
        )


def _named(count: int, *, gradient_of: int | None, micro_batch: int | None) -> str:
    parts = [] if micro_batch is None else [f"micro-batch {micro_batch + 1}"]
    parts += [] if gradient_of is None else [f"the gradient of micro-batch {gradient_of + 1}"]
    return f"{' and '.join(parts)} of {count}"


def _outputs(
    model: PreTrainedModel, one: TokenPass, entering: Tensor | None = None
) -> TokenStatistics:
    return token_outputs(
        model,
        one.micro_batch,
        temperature=one.temperature,
        entropy=one.entropy,
        with_sum_pi_squared=one.with_sum_pi_squared,
        routing=one.routing,
        entering=entering,
    )
