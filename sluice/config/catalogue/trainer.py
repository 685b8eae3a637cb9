"""`trainer.*` and the sections around it that only verl's own launcher needs."""

from __future__ import annotations

from typing import Literal

from sluice.config.catalogue.entry import (
    Entry,
    Refusal,
    block,
    group,
    honoured,
    inapplicable,
    mapped,
    refused,
    refused_prefix,
)

_KEY = "trainer"
_HDFS = refused_prefix("hdfs://", "nothing is read from or written to HDFS; give a local folder")
_ASYNC = "sluice.asynchrony.max_staleness"

ENTRIES: tuple[Entry, ...] = (
    inapplicable(
        f"{_KEY}.balance_batch",
        bool,
        True,
        "Share rows over ranks so that each has about the same work.",
        "the rows of every mini-batch are shared so",
        silent=(True,),
        effect="Ranks wait less for each other",
    ),
    honoured(f"{_KEY}.total_epochs"),
    honoured(f"{_KEY}.total_training_steps", unit="train batches"),
    honoured(f"{_KEY}.project_name", verl_default="verl_examples"),
    honoured(f"{_KEY}.experiment_name", verl_default="gsm8k"),
    honoured(
        f"{_KEY}.logger",
        verl_default="[console, wandb]",
        refusals=(
            Refusal(
                lambda value: "clearml" in (value if isinstance(value, list) else [value]),
                "there is no logger clearml; use mlflow or wandb",
            ),
        ),
        advice="file is taken as jsonl, vemlp_wandb as wandb; a single name needs no list",
    ),
    honoured(f"{_KEY}.log_val_generations", advice="10 to read along"),
    honoured(f"{_KEY}.rollout_data_dir"),
    honoured(f"{_KEY}.validation_data_dir"),
    honoured(f"{_KEY}.nnodes"),
    honoured(
        f"{_KEY}.n_gpus_per_node",
        verl_default="8",
        advice="Devices for training only: rollouts have their own",
    ),
    honoured(f"{_KEY}.save_freq", unit="steps"),
    honoured(f"{_KEY}.test_freq", unit="steps"),
    honoured(f"{_KEY}.val_before_train"),
    honoured(f"{_KEY}.val_only"),
    honoured(f"{_KEY}.critic_warmup", unit="steps"),
    honoured(f"{_KEY}.resume_mode"),
    honoured(f"{_KEY}.resume_from_path", refusals=_HDFS),
    honoured(
        f"{_KEY}.default_local_dir",
        refusals=_HDFS,
        verl_default="checkpoints/<project_name>/<experiment_name>",
    ),
    refused(
        f"{_KEY}.default_hdfs_dir",
        str | None,
        None,
        "Copy of checkpoints on HDFS.",
        "nothing is written to HDFS; use default_local_dir",
    ),
    honoured(
        f"{_KEY}.max_actor_ckpt_to_keep", effect="Disk: about 12 bytes a parameter each", advice="2"
    ),
    honoured(f"{_KEY}.max_critic_ckpt_to_keep"),
    mapped(
        f"{_KEY}.remove_previous_ckpt_in_save",
        bool,
        False,
        "Keep only the newest checkpoint.",
        "sets max_actor_ckpt_to_keep to 1 if true",
        targets=(f"{_KEY}.max_actor_ckpt_to_keep",),
        silent=(False,),
    ),
    inapplicable(
        f"{_KEY}.del_local_ckpt_after_load",
        bool,
        False,
        "Delete a checkpoint after loading it.",
        "checkpoints are kept",
        silent=(False,),
    ),
    inapplicable(
        f"{_KEY}.esi_redundant_time",
        int,
        0,
        "Save this early before the machine goes.",
        "checkpoints are written every save_freq steps and at the last",
        silent=(0,),
    ),
    inapplicable(
        f"{_KEY}.ray_wait_register_center_timeout",
        int,
        300,
        "Seconds verl waits for its workers.",
        "sluice.trainer.replica_wait_timeout_s holds",
    ),
    honoured(f"{_KEY}.device", verl_default="cuda"),
    honoured(f"{_KEY}.seed"),
    inapplicable(
        f"{_KEY}.use_v1",
        bool,
        True,
        "Which of verl's two trainers.",
        "there is one",
        silent=(True, False),
    ),
    mapped(
        f"{_KEY}.v1.trainer_mode",
        Literal["sync", "colocate_async", "separate_async"],
        "sync",
        "How far verl's generation runs ahead.",
        f"sets {_ASYNC}: 0 for sync, num_warmup_batches for colocate_async, "
        "max_off_policy_threshold - 1 for separate_async",
        targets=(_ASYNC,),
    ),
    mapped(
        f"{_KEY}.v1.colocate_async.num_warmup_batches",
        int,
        1,
        "Batches ahead.",
        f"sets {_ASYNC} in mode colocate_async",
        targets=(_ASYNC,),
    ),
    inapplicable(
        f"{_KEY}.v1.separate_async.num_warmup_batches",
        int,
        1,
        "Batches ahead.",
        f"{_ASYNC} decides",
    ),
    inapplicable(
        f"{_KEY}.v1.separate_async.parameter_sync_step",
        int,
        4,
        "Updates between two transfers of weights.",
        "weights are published after every train batch",
    ),
    mapped(
        f"{_KEY}.v1.sampler.max_off_policy_threshold",
        int,
        8,
        "Oldest sample, steps.",
        f"sets {_ASYNC} to one less in mode separate_async",
        targets=(_ASYNC,),
    ),
    mapped(
        f"{_KEY}.v1.sampler.max_off_policy_strategy",
        Literal["drop", "wait"],
        "drop",
        "What happens to older ones.",
        "sets sluice.asynchrony.on_stale",
        targets=("sluice.asynchrony.on_stale",),
    ),
    inapplicable(
        f"{_KEY}.v1.sampler.sync_refill_failed_groups",
        bool,
        False,
        "Replace failed groups.",
        "failed groups are always replaced",
        silent=(True,),
    ),
    refused(
        f"{_KEY}.v1.sampler.custom_sampler.path",
        str | None,
        None,
        "File with a sampler of one's own.",
        "batches are formed by staleness; leave the key out",
    ),
    *group(
        f"{_KEY}.v1",
        {"sampler.custom_sampler.name": None},
        "Class of that sampler.",
        "batches are formed by staleness",
    ),
    *(
        block(f"{_KEY}.v1.{name}", "Further settings of that trainer.", f"{_ASYNC} decides")
        for name in ("sync", "separate_async.hybrid_rollout", "sampler.sampler_kwargs")
    ),
    block(
        "async_training",
        "Settings of verl's fully asynchronous recipe.",
        "sluice.asynchrony decides; the counterpart of a staleness_threshold s in (0, 1] is "
        "max_staleness=1 with ahead_share=s",
    ),
    block("ray_kwargs", "Arguments of Ray.", "services start without Ray"),
    block("ray_init", "Arguments of Ray.", "services start without Ray"),
    block("transfer_queue", "verl's store between workers.", "batches travel over gRPC"),
    block("global_profiler", "Profilers.", "timings are in metrics.jsonl"),
    block("skip", "Repeat rollouts from a file.", "responses are always generated"),
    block(
        "defaults",
        "Hydra's list of further files.",
        "no further files are read; give all keys in one file or as overrides",
    ),
    block("hydra", "Hydra's own settings.", "configurations are read without Hydra"),
    refused(
        "distillation.enabled",
        bool,
        False,
        "Learn from a teacher.",
        "there is no teacher; leave the key out",
    ),
    block("distillation", "Settings of the teacher.", "there is no teacher"),
)
