"""`*.optim.*`, of the actor and of the critic."""

from __future__ import annotations

from sluice.config.catalogue.entry import (
    Entry,
    Refusal,
    below,
    block,
    honoured,
    inapplicable,
    mapped,
    refused,
)

_ADAM = ("adam", "adamw")
_ONLY_ADAM = (
    Refusal(
        lambda value: isinstance(value, str) and value.lower() not in _ADAM,
        "AdamW is the only optimizer; leave the key out",
    ),
)
_DECAY_STYLES = ("constant", "linear", "cosine", "inverse_square_root")
_ONLY_DECAY = (
    Refusal(
        lambda value: value not in _DECAY_STYLES,
        "the learning rate may be constant, linear, cosine or inverse_square_root after its "
        "warm-up",
    ),
)
_STATE_ON_HOST = "the optimizer's state stays on the device of its rank"


_SHARED: tuple[Entry, ...] = (
    honoured(
        "lr_warmup_steps",
        unit="train batches",
        advice="10 in DAPO; the first batch then has learning rate 0",
    ),
    honoured("lr_warmup_steps_ratio"),
    honoured("weight_decay", advice="0.1 in DAPO, 0.01 elsewhere"),
    honoured("betas"),
    honoured("eps"),
    honoured("clip_grad", advice="1.0; a norm that is often clipped hints at a high lr"),
    honoured("lr_scheduler_type"),
    honoured("min_lr_ratio"),
    honoured("total_training_steps", unit="train batches"),
    honoured("num_cycles"),
    inapplicable(
        "optimizer",
        str,
        "AdamW",
        "Optimizer.",
        "AdamW is used",
        silent=("AdamW", "adam"),
        refusals=_ONLY_ADAM,
    ),
    inapplicable(
        "optimizer_impl",
        str,
        "torch.optim",
        "Module of the optimizer.",
        "torch.optim is used",
        silent=("torch.optim",),
    ),
    inapplicable(
        "zero_indexed_step",
        bool,
        True,
        "Whether the first step is 0.",
        "the first train batch is step 0",
        silent=(True,),
    ),
    refused(
        "lr_warmup_init",
        float,
        0.0,
        "First learning rate of the warm-up.",
        "the warm-up starts at 0; leave the key out",
    ),
    mapped(
        "lr_decay_style",
        str,
        "constant",
        "Megatron's name for the schedule.",
        "sets lr_scheduler_type",
        targets=("lr_scheduler_type",),
        refusals=_ONLY_DECAY,
    ),
    mapped(
        "min_lr",
        float,
        0.0,
        "Megatron's final learning rate.",
        "sets min_lr_ratio to min_lr / lr",
        targets=("min_lr_ratio",),
    ),
    mapped(
        "lr_decay_steps",
        int | None,
        None,
        "Megatron's length of the schedule.",
        "sets total_training_steps",
        unit="train batches",
        targets=("total_training_steps",),
    ),
    refused(
        "weight_decay_incr_style",
        str,
        "constant",
        "How the weight decay changes.",
        "the weight decay is constant",
    ),
    inapplicable(
        "lr_wsd_decay_style",
        str,
        "exponential",
        "Decay after a stable phase.",
        "there is no such schedule",
    ),
    inapplicable(
        "lr_wsd_decay_steps",
        int | None,
        None,
        "Length of that decay.",
        "there is no such schedule",
        silent=(None,),
    ),
    inapplicable(
        "use_checkpoint_opt_param_scheduler",
        bool,
        False,
        "Take the schedule from the checkpoint.",
        "the schedule is the configuration's; its position is the checkpoint's",
        silent=(False,),
    ),
    inapplicable(
        "override_optimizer_config.optimizer_offload_fraction",
        float,
        0.0,
        "Share of the optimizer's work done on the host (Megatron).",
        _STATE_ON_HOST,
        effect="In Megatron: device memory for host memory and time",
        advice="1 for models of several hundred billion parameters in Megatron",
        silent=(0,),
    ),
    inapplicable(
        "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
        bool,
        False,
        "Overlap copies with that work.",
        _STATE_ON_HOST,
        silent=(False,),
    ),
    inapplicable(
        "override_optimizer_config.use_precision_aware_optimizer",
        bool,
        False,
        "Keep the optimizer's state in lower precision where possible.",
        "the optimizer's state has the dtype of the master weights",
        silent=(False,),
    ),
    inapplicable(
        "override_optimizer_config.optimizer_cpu_offload",
        bool,
        False,
        "Let the host do the optimizer's work.",
        _STATE_ON_HOST,
        silent=(False,),
    ),
    block(
        "override_optimizer_config",
        "Further arguments of the optimizer.",
        "AdamW takes lr, betas, eps and weight_decay only",
    ),
)


def optim_entries(prefix: str, learning_rate: str) -> tuple[Entry, ...]:
    """Rows for one optimizer; `learning_rate` is advice."""
    entries = (honoured("lr", advice=learning_rate), *_SHARED)
    return below(f"{prefix}.optim", entries)


ENTRIES: tuple[Entry, ...] = optim_entries(
    "actor_rollout_ref.actor",
    "1e-6 for models from seven billion parameters; 1e-5 at most for smaller ones",
) + optim_entries("critic", "1e-5, ten times the policy's")
