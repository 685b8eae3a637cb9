"""`megatron.*` of actor, reference and critic: accepted, without effect."""

from __future__ import annotations

from typing import Literal

from sluice.config.catalogue.entry import Entry, below, block, inapplicable

_WHOLE = "ranks are data parallel and share the model by FSDP2 (fsdp_config.fsdp_size)"
_ON_DEVICE = "weights, gradients and optimizer state stay on the device of their rank"
_LAYERS = "the model's own layers run as transformers builds them"
_STAGES = "there are no pipeline stages"
_HF = "weights are read and written in Hugging Face's format directly"
_RECOMPUTE = "use actor_rollout_ref.model.enable_gradient_checkpointing"


def megatron_entries(prefix: str) -> tuple[Entry, ...]:
    """Rows for one block of Megatron keys."""
    return (*_parallel(prefix), *_memory(prefix), *_transformer(prefix), *_further(prefix))


def _parallel(prefix: str) -> tuple[Entry, ...]:
    def size(name: str, meaning: str, advice: str = "", default: int | None = 1) -> Entry:
        return inapplicable(
            f"{prefix}.{name}",
            int | None if default is None else int,
            default,
            meaning,
            _WHOLE,
            silent=(default, 1),
            advice=advice,
        )

    return (
        size(
            "tensor_model_parallel_size",
            "Devices that share every layer.",
            "In Megatron first within a node, before pipeline stages",
        ),
        size("pipeline_model_parallel_size", "Stages of layers."),
        size("virtual_pipeline_model_parallel_size", "Interleaved stages a device.", default=None),
        size(
            "context_parallel_size",
            "Devices that share one sequence.",
            "In Megatron for very long sequences",
        ),
        size("expert_model_parallel_size", "Devices that share the experts."),
        size("expert_tensor_parallel_size", "Devices that share each expert.", default=None),
        inapplicable(
            f"{prefix}.sequence_parallel",
            bool,
            True,
            "Split activations along the sequence between tensor-parallel devices.",
            _WHOLE,
        ),
    )


def _memory(prefix: str) -> tuple[Entry, ...]:
    return tuple(
        inapplicable(
            f"{prefix}.{name}",
            bool,
            False,
            f"Move {what} to the host while unused.",
            _ON_DEVICE,
            silent=(False,),
            advice="In verl on where memory is short; the engine may then take 0.8 to 0.9",
        )
        for name, what in (
            ("param_offload", "weights"),
            ("grad_offload", "gradients"),
            ("optimizer_offload", "the optimizer's state"),
        )
    )


_TRANSFORMER: tuple[Entry, ...] = (
    inapplicable(
        "recompute_granularity",
        Literal["full", "selective"] | None,
        None,
        "What the backward pass computes again.",
        _RECOMPUTE,
        silent=(None,),
        advice="full with uniform and 1 layer saves most memory",
    ),
    inapplicable(
        "recompute_method",
        Literal["uniform", "block"] | None,
        None,
        "Which layers do.",
        _RECOMPUTE,
        silent=(None,),
    ),
    inapplicable(
        "recompute_num_layers",
        int | None,
        None,
        "Layers of one unit.",
        _RECOMPUTE,
        silent=(None,),
    ),
    inapplicable(
        "recompute_modules",
        list[str] | None,
        ["core_attn"],
        "Modules that do, where selective.",
        _RECOMPUTE,
        silent=(None,),
    ),
    inapplicable("attention_backend", str, "flash", "Attention kernel.", _LAYERS),
    inapplicable(
        "moe_router_dtype",
        str | None,
        None,
        "Dtype of the router.",
        _LAYERS,
        advice="fp32 in Megatron: routing is sensitive to rounding",
    ),
    inapplicable(
        "moe_shared_expert_overlap",
        bool,
        False,
        "Overlap the shared expert with communication.",
        _LAYERS,
        silent=(False,),
    ),
    inapplicable(
        "moe_permute_fusion",
        bool,
        False,
        "Fused permutation of tokens.",
        _LAYERS,
        silent=(False,),
    ),
    inapplicable(
        "moe_enable_deepep",
        bool,
        False,
        "DeepEP's communication; needs the flex dispatcher.",
        _LAYERS,
        silent=(False,),
    ),
    inapplicable(
        "moe_token_dispatcher_type",
        str | None,
        None,
        "How tokens reach experts: flex, alltoall, allgather.",
        _LAYERS,
        silent=(None,),
    ),
    inapplicable(
        "gradient_accumulation_fusion",
        bool,
        False,
        "Add weight gradients within the kernel.",
        _LAYERS,
        silent=(False,),
    ),
    inapplicable(
        "account_for_embedding_in_pipeline_split",
        bool,
        False,
        "Count the embedding as a layer when stages are cut.",
        _STAGES,
        silent=(False,),
    ),
    inapplicable(
        "account_for_loss_in_pipeline_split",
        bool,
        False,
        "Count the output layer as a layer when stages are cut.",
        _STAGES,
        silent=(False,),
    ),
    inapplicable(
        "num_layers_in_first_pipeline_stage",
        int | None,
        None,
        "Layers of the first stage.",
        _STAGES,
        silent=(None,),
    ),
    inapplicable(
        "num_layers_in_last_pipeline_stage",
        int | None,
        None,
        "Layers of the last stage.",
        _STAGES,
        silent=(None,),
    ),
)


def _transformer(prefix: str) -> tuple[Entry, ...]:
    key = f"{prefix}.override_transformer_config"
    further = block(key, "Further arguments of Megatron's transformer.", _LAYERS)
    return (*below(key, _TRANSFORMER), further)


_FURTHER: tuple[Entry, ...] = (
    inapplicable(
        "use_mbridge",
        bool,
        True,
        "Convert weights between Hugging Face and Megatron.",
        _HF,
    ),
    inapplicable("vanilla_mbridge", bool, False, "Which such converter.", _HF),
    inapplicable(
        "use_megatron_fsdp",
        bool,
        False,
        "Megatron's own sharding.",
        _WHOLE,
        silent=(False,),
    ),
    inapplicable(
        "use_distributed_optimizer",
        bool,
        True,
        "Share the optimizer's state between ranks.",
        _WHOLE,
    ),
    inapplicable(
        "use_dist_checkpointing",
        bool,
        False,
        "Megatron's checkpoint format.",
        _HF,
        silent=(False,),
    ),
    inapplicable(
        "dist_checkpointing_path",
        str | None,
        None,
        "Folder of such a checkpoint.",
        _HF,
        silent=(None,),
    ),
    inapplicable("dist_checkpointing_prefix", str, "", "Prefix within it.", _HF, silent=("",)),
    inapplicable("seed", int, 42, "Seed of the trainer's ranks.", "trainer.seed holds"),
    inapplicable("forward_only", bool, False, "No backward pass.", _WHOLE, silent=(False,)),
    inapplicable(
        "dtype",
        str,
        "bfloat16",
        "Dtype of the passes.",
        "actor.fsdp_config.dtype holds",
    ),
    inapplicable(
        "load_weight",
        bool,
        True,
        "Load weights at the start.",
        "they are loaded",
        silent=(True,),
    ),
    block("override_ddp_config", "Arguments of gradient reduction.", _WHOLE),
    block("override_mcore_model_config", "Arguments of Megatron's model.", _LAYERS),
    block("qat", "Training aware of quantisation.", "weights are not quantised"),
)


def _further(prefix: str) -> tuple[Entry, ...]:
    return below(prefix, _FURTHER)


ENTRIES: tuple[Entry, ...] = (
    *megatron_entries("actor_rollout_ref.actor.megatron"),
    *megatron_entries("actor_rollout_ref.ref.megatron"),
    *megatron_entries("critic.megatron"),
)
