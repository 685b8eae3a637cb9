"""The parallel layout of the trainer's ranks: stages, copies, shards, sequences, tensors,
experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorFsdpConfig, TransformerOverrides
from sluice.errors import ConfigError

_FSDP = "actor_rollout_ref.actor.fsdp_config"
SHARD_KEY = f"{_FSDP}.fsdp_size"
SEQUENCE_KEY = f"{_FSDP}.ulysses_sequence_parallel_size"
EXPERT_KEY = f"{_FSDP}.expert_parallel_size"
TENSOR_KEY = f"{_FSDP}.tensor_parallel_size"
PIPELINE_KEY = f"{_FSDP}.pipeline_parallel_size"
_CUTS = "actor_rollout_ref.actor.megatron.override_transformer_config"
FIRST_KEY = f"{_CUTS}.num_layers_in_first_pipeline_stage"
LAST_KEY = f"{_CUTS}.num_layers_in_last_pipeline_stage"
EMBEDDING_KEY = f"{_CUTS}.account_for_embedding_in_pipeline_split"
LOSS_KEY = f"{_CUTS}.account_for_loss_in_pipeline_split"
_RANKS = "trainer ranks (trainer.nnodes * trainer.n_gpus_per_node)"

Division: TypeAlias = tuple[str, int, int, str]
"""A key, its size, the number that it must divide, and what that is a number of."""


def divisions(
    ranks: int, shard: int, sequence: int, experts: int, tensor: int = 1, pipeline: int = 1
) -> Iterator[Division]:
    """Yield the number that each size of a layout must divide; see `ParallelLayout`."""
    yield PIPELINE_KEY, pipeline, ranks, _RANKS
    if ranks % pipeline:
        return  # there are no stages to cut
    of_stage = _RANKS if pipeline == 1 else "trainer ranks of a stage"
    yield TENSOR_KEY, tensor, ranks // pipeline, of_stage
    if ranks % (tensor * pipeline):
        return  # the other sizes divide what these leave
    remaining = ranks // (tensor * pipeline)
    of_left = _remaining_ranks_text(ranks, remaining)
    yield SHARD_KEY, shard, remaining, of_left
    yield SEQUENCE_KEY, sequence, remaining, of_left
    of_copy = f"{SHARD_KEY} * tensor_parallel_size" if tensor > 1 else SHARD_KEY
    yield EXPERT_KEY, experts, shard * tensor, f"ranks that share one copy of the model ({of_copy})"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of the trainer's process groups.

    Ranks are numbered by stage, then by copy and shard, which include the sequence, then by tensor:
    neighboring ranks cut the same layers.

    Args:
        ranks: trainer ranks.
        shard: ranks of one stage and tensor index that share one copy of weights, gradients and
            optimizer state (FSDP2); there are several copies if it is below `peers` (HSDP).
        sequence: ranks that share each packed sequence (Ulysses).
        experts: ranks over which the experts of a layer are divided, the innermost of a copy's in a
            stage; each expert is sharded over the rest of them.
        tensor: ranks that cut each matrix of a layer among them, the innermost.
        pipeline: stages; each has a part of the layers.

    Raises:
        ConfigError: a size does not divide its number; the error names both and the nearest
            divisors.
    """

    ranks: int
    shard: int = 1
    sequence: int = 1
    experts: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for key, size, number, things in divisions(
            self.ranks, self.shard, self.sequence, self.experts, self.tensor, self.pipeline
        ):
            _check_divides(key, size, number, things)

    @property
    def peers(self) -> int:
        """The number of ranks of one stage and tensor index, which hold the same part of the
        model."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def copy(self) -> int:
        """Ranks of a stage that hold one copy of its layers."""
        return self.shard * self.tensor

    @property
    def row_ranks(self) -> int:
        """Ranks of a stage that train the same rows."""
        return self.sequence * self.tensor

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that train different rows."""
        return self.peers // self.sequence


def trainer_layout(config: RunConfig, ranks: int) -> ParallelLayout:
    """Return the layout that the policy's keys configure.

    Args:
        config: loading has put verl's spellings for other backends into `fsdp_config`.
        ranks: trainer ranks.

    Raises:
        ConfigError: a size does not divide; names key, value and the nearest that do.
    """
    return layout_of(config.actor_rollout_ref.actor.fsdp_config, ranks)


def layout_of(sharding: ActorFsdpConfig, ranks: int) -> ParallelLayout:
    """Return the layout of some ranks; see `trainer_layout`."""
    outer = ParallelLayout(
        ranks, tensor=sharding.tensor_parallel_size, pipeline=sharding.pipeline_parallel_size
    )
    return replace(
        outer,
        shard=shard_size(sharding.fsdp_size, outer.peers, ranks, SHARD_KEY),
        sequence=sharding.ulysses_sequence_parallel_size,
        experts=sharding.expert_parallel_size,
    )


def shard_size(fsdp_size: int, peers: int, ranks: int, key: str) -> int:
    """Return how many ranks share a copy of a model: all, if the size is below 1 or too large.

    Args:
        peers: trainer ranks of one stage and tensor index.
        ranks: trainer ranks.
        key: the key of `fsdp_size`, for the error.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    if not 0 < fsdp_size < peers:
        return peers
    _check_divides(key, fsdp_size, peers, _remaining_ranks_text(ranks, peers))
    return fsdp_size


def shares_heads(ranks: int, heads: int, kv_heads: int) -> bool:
    """Return whether ranks can share attention heads evenly: few key-value heads are repeated."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def sequence_sizes(heads: int, kv_heads: int) -> list[int]:
    """Return how many ranks can share a sequence of a model with so many heads."""
    return [size for size in range(1, heads + 1) if shares_heads(size, heads, kv_heads)]


def check_experts(experts: int, num_experts: int, family: str) -> None:
    """Refuse ranks that cannot divide a model's experts evenly.

    Args:
        experts: ranks that divide them.
        num_experts: of one layer; 0 for a dense model.
        family: the model's name for itself, for the error.

    Raises:
        ConfigError: names the numbers and the nearest that divide.
    """
    if experts > 1 and num_experts == 0:
        raise ConfigError(
            f"{EXPERT_KEY}={experts}: a {family} model has no experts; leave the key at 1"
        )
    _check_divides(EXPERT_KEY, experts, num_experts, f"experts of a layer of the {family} model")


def nearest_divisors(wanted: int, number: int, maximum: int | None = None) -> str:
    """Return the divisors of `number` nearest to `wanted`, up to `maximum`, as text: ``4 or 8``."""
    divisors = [size for size in range(1, (maximum or number) + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return " or ".join(map(str, below + above))


def _remaining_ranks_text(ranks: int, peers: int) -> str:
    return _RANKS if peers == ranks else "trainer ranks that tensor and pipeline sizes leave"


def _check_divides(key: str, size: int, number: int, things: str) -> None:
    if size > 1 and number % size:
        raise ConfigError(
            f"{key}={size} does not divide the {number} {things}; "
            f"give {nearest_divisors(size, number)}"
        )


def stage_layers(num_layers: int, stages: int, cut: TransformerOverrides) -> list[range]:
    """Return the numbers of each stage's layers, at least one each, by Megatron's keys.

    All stages have equally many layers, where the embedding and the loss may count as a layer each;
    or the first and the last stage have given numbers, and those between share the rest evenly.

    Raises:
        ConfigError: the layers do not divide; names the numbers and the nearest that work.
    """
    if num_layers < stages:
        raise ConfigError(
            f"{PIPELINE_KEY}={stages}: the model has {num_layers} layers, and a stage needs at "
            f"least one; give at most {num_layers}"
        )
    first, last = cut.num_layers_in_first_pipeline_stage, cut.num_layers_in_last_pipeline_stage
    embedding = bool(cut.account_for_embedding_in_pipeline_split)
    loss = bool(cut.account_for_loss_in_pipeline_split)
    if stages == 1:
        sizes = [num_layers]
    elif (first, last) != (None, None):
        if embedding or loss:
            raise ConfigError(
                f"{FIRST_KEY} and {LAST_KEY} set the layers of a stage, which account_for_embedding"
                "_in_pipeline_split and account_for_loss_in_pipeline_split derive; give one of both"
            )
        sizes = _stage_sizes_with_ends(num_layers, stages, first, last)
    else:
        sizes = _even_stage_sizes(num_layers, stages, embedding=embedding, loss=loss)
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def different_stages(stages: int) -> list[int]:
    """Return the numbers of the stages whose ranks hold different bytes: first, second and last.

    Those between have equally many layers; the second has the most micro-batches in flight.
    """
    return sorted({0, min(1, stages - 1), stages - 1})


def check_image_layers(stages: Sequence[range], added: int) -> None:
    """Refuse a first stage without all layers that the image encoder adds to: it holds that too.

    Args:
        stages: of a pipeline, from `stage_layers`.
        added: how many of the first layers (Qwen3-VL's DeepStack); 0 for other models.

    Raises:
        ConfigError: names the numbers.
    """
    first_layers = len(stages[0])
    if first_layers < added and len(stages) > 1:
        raise ConfigError(
            f"{PIPELINE_KEY}={len(stages)}: the first stage has {first_layers} of the model's "
            f"{stages[-1].stop} layers, and the image encoder, which it holds too, adds to the "
            f"first {added}; set {FIRST_KEY}={added} or more, or use fewer stages"
        )


def _even_stage_sizes(num_layers: int, stages: int, *, embedding: bool, loss: bool) -> list[int]:
    number = num_layers + embedding + loss
    # Given layers and these keys exclude each other.
    not_counted = f" and {EMBEDDING_KEY}=false" * embedding + f" and {LOSS_KEY}=false" * loss
    if number % stages:
        counted_things = " and ".join(["layers", *["embedding"] * embedding, *["loss"] * loss])
        raise ConfigError(
            f"{PIPELINE_KEY}={stages} does not divide {number} {counted_things} of the model; give "
            f"{nearest_divisors(stages, number, maximum=num_layers)}, or "
            f"{_suggested_cut(num_layers, stages)}{not_counted}"
        )
    sizes = [number // stages] * stages  # 2 at least with embedding or loss among them
    sizes[0] -= embedding
    sizes[-1] -= loss
    return sizes


def _stage_sizes_with_ends(
    num_layers: int, stages: int, first: int | None, last: int | None
) -> list[int]:
    remaining = num_layers - (first or 0) - (last or 0)
    between = stages - (first is not None) - (last is not None)
    fits = remaining == 0 if between == 0 else remaining >= between and remaining % between == 0
    if not fits:
        settings = [f"{FIRST_KEY}={first}"] * (first is not None)
        settings += [f"{LAST_KEY}={last}"] * (last is not None)
        fault = (
            f"this leaves {remaining} of {num_layers} layers for the other {between} stages, which "
            "they cannot share evenly"
            if between
            else f"their sum is not the model's {num_layers} layers"
        )
        raise ConfigError(
            f"{' and '.join(settings)} with {PIPELINE_KEY}={stages}: {fault}; "
            f"give {_suggested_cut(num_layers, stages)}"
        )
    sizes = [remaining // max(between, 1)] * stages
    sizes[0] = first or sizes[0]
    sizes[-1] = last or sizes[-1]
    return sizes


def _suggested_cut(num_layers: int, stages: int) -> str:
    """Return values of the keys that cut so many layers almost evenly."""
    layers = -(-num_layers // stages)
    if num_layers - layers * (stages - 2) < 2:
        layers -= 1
    ends = num_layers - layers * (stages - 2)
    return f"{FIRST_KEY}={-(-ends // 2)} with {LAST_KEY}={ends // 2}"
