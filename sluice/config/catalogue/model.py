"""`actor_rollout_ref.model.*` and what stands beside it."""

from __future__ import annotations

from sluice.config.catalogue.entry import (
    Entry,
    below,
    block,
    group,
    honoured,
    inapplicable,
    refused,
    refused_prefix,
)

_ROOT = "actor_rollout_ref"
_HDFS = refused_prefix("hdfs://", "nothing is fetched from HDFS; copy the model to a local disk")
_ADAPTERS = "all weights are trained; leave the key out"
_BESIDE = "it is read from actor_rollout_ref.model.path; put it there"


_SHARED: tuple[Entry, ...] = (
    inapplicable(
        "enable_activation_offload",
        bool,
        False,
        "Move activations to host memory between the passes.",
        "activations stay on the device; use enable_gradient_checkpointing to save memory",
        silent=(False,),
        effect="In verl less device memory, and slower",
    ),
    inapplicable(
        "use_fused_kernels",
        bool,
        False,
        "Log-probabilities without materialised logits.",
        "logits of one micro-batch are materialised; results are the same, the peak is higher",
        silent=(False,),
        advice="Where logits of a large vocabulary do not fit, make micro-batches smaller",
    ),
    block("fused_kernel_options", "Choice of fused kernel.", "none is used"),
    inapplicable(
        "use_liger",
        bool,
        False,
        "Liger kernels.",
        "the model's own layers run; results are the same",
        silent=(False,),
    ),
    refused("lora_rank", int, 0, "Rank of low-rank adapters.", _ADAPTERS),
    inapplicable("lora_alpha", float, 16, "Scale of the adapters.", "there are no adapters"),
    inapplicable(
        "target_modules",
        str | list[str],
        "all-linear",
        "Layers with adapters.",
        "there are no adapters",
    ),
    inapplicable(
        "exclude_modules",
        str | list[str] | None,
        None,
        "Layers without adapters.",
        "there are no adapters",
        silent=(None,),
    ),
    refused("lora_adapter_path", str | None, None, "Adapters to start from.", _ADAPTERS),
    refused("lora.rank", int, 0, "Rank of Megatron's adapters.", _ADAPTERS),
    *group(
        "lora",
        {
            "type": "lora",
            "merge": False,
            "alpha": 32,
            "dropout": 0.0,
            "target_modules": None,
            "exclude_modules": None,
            "dropout_position": "pre",
            "lora_A_init_method": "xavier",
            "lora_B_init_method": "zero",
            "a2a_experimental": False,
            "dtype": None,
            "adapter_path": None,
            "freeze_vision_model": True,
            "freeze_vision_projection": True,
            "freeze_language_model": True,
        },
        "Setting of Megatron's adapters.",
        "there are no adapters",
    ),
    refused(
        "external_lib",
        str | None,
        None,
        "Module imported before the model loads.",
        "only models that transformers knows are loaded; use trust_remote_code for others",
    ),
    block(
        "override_config",
        "Changes to the model's config.json.",
        "config.json holds as it is; change it in the model's folder",
    ),
    refused(
        "custom_chat_template",
        str | None,
        None,
        "Chat template instead of the tokenizer's.",
        _BESIDE,
    ),
    refused("hf_config_path", str | None, None, "Folder of config.json.", _BESIDE),
    inapplicable(
        "tokenizer_path",
        str | None,
        None,
        "Folder of the tokenizer.",
        _BESIDE,
        silent=(None,),
    ),
    inapplicable(
        "use_shm",
        bool,
        False,
        "Copy weights to shared memory first.",
        "weights are read from disk",
        silent=(False,),
    ),
    inapplicable(
        "tiled_mlp.enabled",
        bool,
        False,
        "Feed-forward layers in tiles.",
        "they run whole",
        silent=(False,),
    ),
    inapplicable("tiled_mlp.num_shards", int, 4, "Number of tiles.", "they run whole"),
    block("mtp", "Prediction of several tokens.", "one token is predicted"),
    block("fused_mlp", "Fused feed-forward layers.", "the model's own run"),
)


def model_entries(prefix: str) -> tuple[Entry, ...]:
    """What verl knows of a model besides its path, for the policy and for the critic."""
    return below(prefix, _SHARED)


ENTRIES: tuple[Entry, ...] = (
    inapplicable(
        f"{_ROOT}.hybrid_engine",
        bool,
        True,
        "Actor and engine share devices.",
        "rollout and trainer are services of their own; each takes the devices it is started on",
        silent=(False,),
    ),
    inapplicable(
        f"{_ROOT}.nccl_timeout",
        int,
        600,
        "Seconds a collective may take.",
        "sluice.weights.timeout_s and sluice.trainer.command_timeout_s hold",
    ),
    honoured(
        f"{_ROOT}.model.path",
        verl_default="~/models/deepseek-llm-7b-chat",
        refusals=_HDFS,
        advice="A local folder; the same one serves policy, engine and reference",
    ),
    honoured(
        f"{_ROOT}.model.enable_gradient_checkpointing",
        verl_default="true",
        effect="Less activation memory for a second forward pass of every layer",
        advice="On for anything that does not fit easily",
    ),
    inapplicable(
        f"{_ROOT}.model.use_remove_padding",
        bool,
        True,
        "Pack tokens without padding.",
        "rows are always packed, so that no work is done for padding",
        silent=(True,),
        verl_default="false before version 0.7",
    ),
    honoured(f"{_ROOT}.model.trust_remote_code"),
    *model_entries(f"{_ROOT}.model"),
)
