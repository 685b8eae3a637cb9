"""One model of this rank with all that training it takes, held whole or in shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.trainer.learner.optimizer import PolicyOptimizer
from services.trainer.learner.parallel import DataParallel
from services.trainer.learner.policy_state import weight_sum
from services.trainer.learner.sharded_gradients import ShardedGradients
from services.trainer.learner.shards import Shards, shard_model, shard_size
from sluice.config.actor import FsdpConfig
from sluice.config.optim import OptimConfig

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """`parameters` are this rank's, whole or sharded, tied ones once; the optimizer has those that
    are trained. `initial_sum` is `weight_sum` of what was loaded."""

    model: PreTrainedModel
    parameters: Mapping[str, nn.Parameter]
    optimizer: PolicyOptimizer
    shards: Shards | None
    initial_sum: float


def trained_model(
    model: PreTrainedModel,
    sharding: FsdpConfig,
    optim: OptimConfig,
    parallel: DataParallel,
    total_steps: int,
    *,
    key: str,
    device: torch.device,
) -> TrainedModel:
    """Spread a whole model over the ranks, if they share it, and give it an optimizer. Collective.

    Args:
        model: the same on every rank.
        sharding: how many ranks share one copy.
        optim: AdamW and schedule.
        parallel: all ranks.
        total_steps: train batches of the run.
        key: where `sharding` is in the configuration.
        device: where a model that is held whole goes.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    total = weight_sum(model)
    shards = share_model(model, sharding, parallel, key=key, device=device)
    parameters = dict(model.named_parameters()) if shards is None else shards.parameters
    learnt = {name: one for name, one in parameters.items() if one.requires_grad}
    gradients = None
    if shards is not None:
        gradients = ShardedGradients(list(learnt.values()), parallel, shards.num_copies)
    optimizer = PolicyOptimizer(learnt, optim, total_steps, gradients)
    return TrainedModel(model, parameters, optimizer, shards, total)


def share_model(
    model: PreTrainedModel,
    sharding: FsdpConfig,
    parallel: DataParallel,
    *,
    key: str,
    device: torch.device,
) -> Shards | None:
    """Cut a model over the ranks; ``None``: it is whole, on `device`. Collective.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    size = shard_size(sharding.fsdp_size, parallel.world_size, f"{key}.fsdp_size")
    mesh = parallel.shard_mesh(size)
    if mesh is None:
        model.to(device)  # type: ignore[arg-type]  # transformers narrows torch's overloads
        return None
    return shard_model(
        model,
        mesh,
        reshard_after_forward=sharding.reshard_after_forward,
        sums_once=sharding.use_no_sync_for_gradient_accumulation,
    )
