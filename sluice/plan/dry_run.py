"""What `services.trainer.dry_run` is asked and answers, in a process of its own: it loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

COMMAND = "services.trainer.dry_run"


class DryRunRequest(msgspec.Struct, frozen=True):
    """One trainer layout to run with a model of a few layers.

    Attributes:
        config: of the run, as builtins.
        model: the content of its config.json.
        runs: a stage's number, from 0, and the layers that it has then; one answer for each.
    """

    config: Mapping[str, object]
    model: Mapping[str, object]
    ranks: int
    runs: Sequence[tuple[int, int]]


class PassBytes(msgspec.Struct, frozen=True):
    """Bytes on the device of one of a stage's ranks, for the largest micro-batch of the run.

    Attributes:
        parameters: this rank's shards.
        gradients: of all micro-batches of a step.
        moments: of the optimizer.
        log_prob: peak of a pass without gradients, beside the parameters alone.
        kept: bytes that forward passes leave for their backward passes, of all in flight.
        forward: peak of a forward pass, gradients there, moments not.
        backward: peak of its backward pass, gradients there, moments not.
        step: peak of an optimizer step, moments there.
        moved: bytes that collectives bring to this rank in one micro-batch, by kind.
    """

    parameters: int
    gradients: int
    moments: int
    log_prob: int
    kept: int
    forward: int
    backward: int
    step: int
    moved: Mapping[str, int]
