"""Weights that ranks may divide among them, and linear layers and norms that compute with a part.

Weights are stored as DTensors, but products are of plain tensors: that takes less than half of the
time on the host, and says where ranks communicate (`services.trainer.learner.tensor_share`).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import linear, rms_norm

VALUE_HEADS = ("score", "classifier")
"""Names of a critic's head, one output a token, in the models of transformers."""


def own_part(weight: Tensor) -> Tensor:
    """Return what this rank computes with: its part of a weight, or all of one that is not cut.

    Ranks that cut a layer use a weight that is not cut for other tokens, or for other parts of a
    sum. So its gradient is the sum of theirs: in the dtype of the pass if the step has only this
    one, else in float32, as passes add up.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradients = [Partial() if one.is_replicate() else one for one in weight.placements]
    found: Tensor = weight.to_local(grad_placements=gradients)
    return found


def value_head(model: nn.Module) -> nn.Module | None:
    """Return a critic's head; ``None``: the model is a policy."""
    return next((one for name, one in model.named_children() if name in VALUE_HEADS), None)


class Linear(nn.Linear):
    """A linear layer that ranks may divide among them.

    Attributes:
        cut: the dimension of its weight that ranks cut: 0, its outputs; 1, its inputs, so that the
            output is a part of a sum over ranks; ``None``: every rank has all.
    """

    cut: int | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., outputs] of this rank."""
        weight, bias = self.weight, cast("Tensor | None", self.bias)
        if bias is None:
            return linear(hidden, own_part(weight))
        own = own_part(bias)
        if isinstance(weight, DTensor) and weight.placements[-1] == Shard(1):
            own = own / weight.device_mesh.size()  # every rank adds it to its part of the sum
        return linear(hidden, own_part(weight), own)


def own_linear(theirs: nn.Linear) -> Linear:
    """Return a layer with the same parameters."""
    # Without memory: the parameters are those of the other.
    found = Linear(theirs.in_features, theirs.out_features, bias=False, device="meta")
    found.weight, found.bias = theirs.weight, theirs.bias
    return found


class FloatRmsNorm(nn.Module):
    """Divide by the root mean square, computed in float32, and weigh (Zhang and Sennrich 2019).

    Args:
        theirs: the norm of transformers.
    """

    def __init__(self, theirs: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.weight: nn.Parameter = theirs.weight
        self.eps: float = theirs.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., width] like `hidden`."""
        # vLLM and transformers round before they weigh; SGLang weighs first by default.
        return rms_norm(hidden, self.weight.shape, eps=self.eps) * own_part(self.weight)
