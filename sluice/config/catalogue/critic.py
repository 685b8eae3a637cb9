"""`critic.*` without optimizer and sharding."""

from __future__ import annotations

from sluice.config.catalogue.actor import PER_GPU, STRATEGY, checkpoint_entries
from sluice.config.catalogue.entry import Entry, block, honoured, inapplicable, mapped
from sluice.config.catalogue.model import model_entries

_KEY = "critic"

ENTRIES: tuple[Entry, ...] = (
    honoured(f"{_KEY}.enable", effect="Another model in memory and another update"),
    inapplicable(
        f"{_KEY}.strategy",
        str,
        "fsdp",
        "Backend of the critic.",
        STRATEGY,
        silent=("fsdp", "fsdp2"),
    ),
    honoured(f"{_KEY}.model.path", verl_default="~/models/deepseek-llm-7b-chat"),
    honoured(
        f"{_KEY}.model.enable_gradient_checkpointing",
        verl_default="true",
        effect="Less activation memory for a second forward pass of every layer",
    ),
    inapplicable(
        f"{_KEY}.model.trust_remote_code",
        bool,
        False,
        "Run code of the checkpoint.",
        "actor_rollout_ref.model.trust_remote_code holds",
        silent=(False,),
    ),
    inapplicable(
        f"{_KEY}.model.use_remove_padding",
        bool,
        True,
        "Pack without padding.",
        "rows are always packed",
        silent=(True,),
    ),
    *model_entries(f"{_KEY}.model"),
    honoured(f"{_KEY}.ppo_mini_batch_size", unit="prompts"),
    mapped(
        f"{_KEY}.ppo_micro_batch_size",
        int | None,
        None,
        "Rows per pass over all ranks.",
        PER_GPU,
        unit="rows",
        targets=(f"{_KEY}.ppo_micro_batch_size_per_gpu",),
    ),
    honoured(f"{_KEY}.ppo_micro_batch_size_per_gpu", unit="rows"),
    *(
        inapplicable(
            f"{_KEY}.{name}",
            int | None,
            None,
            meaning,
            "values are computed on the micro-batches of the critic's update; they do not depend "
            "on it",
            unit=unit,
        )
        for name, meaning, unit in (
            ("forward_micro_batch_size", "Rows per pass over all ranks, no gradients.", "rows"),
            ("forward_micro_batch_size_per_gpu", "Rows per pass without gradients.", "rows"),
            ("forward_max_token_len_per_gpu", "Token budget without gradients.", "tokens"),
        )
    ),
    honoured(f"{_KEY}.use_dynamic_bsz"),
    honoured(
        f"{_KEY}.ppo_max_token_len_per_gpu",
        unit="tokens",
        advice="At least twice the actor's: a value head is small",
    ),
    honoured(f"{_KEY}.ppo_epochs"),
    honoured(f"{_KEY}.shuffle"),
    honoured(f"{_KEY}.data_loader_seed"),
    honoured(f"{_KEY}.cliprange_value"),
    honoured(f"{_KEY}.loss_agg_mode"),
    honoured(f"{_KEY}.loss_scale_factor"),
    inapplicable(f"{_KEY}.rollout_n", int, 1, "Copy of rollout.n.", "rollout.n holds"),
    inapplicable(
        f"{_KEY}.nccl_timeout",
        int,
        600,
        "Seconds a collective may take.",
        "sluice.trainer.command_timeout_s holds",
    ),
    inapplicable(
        f"{_KEY}.load_weight",
        bool,
        True,
        "Load weights at the start.",
        "they are loaded",
        silent=(True,),
    ),
    block(f"{_KEY}.profiler", "Profiler of the critic.", "timings are in metrics.jsonl"),
    *checkpoint_entries(_KEY),
)
