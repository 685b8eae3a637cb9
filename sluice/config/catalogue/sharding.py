"""`fsdp_config.*` of actor, reference and critic: one whole copy of the model on every rank."""

from __future__ import annotations

from sluice.config.catalogue.entry import Entry, below, block, group, honoured, inapplicable

_WHOLE = "every trainer rank holds the whole model, so nothing is sharded"
_ON_DEVICE = "weights and optimizer state stay on the device of their rank"
_ENTROPY = "entropy is taken in slices of a micro-batch anyway"


def sharding_entries(prefix: str, *, precision_in_schema: bool) -> tuple[Entry, ...]:
    """Rows for one block of FSDP keys."""
    return (
        *_precision(prefix, in_schema=precision_in_schema),
        *_sharding(prefix),
        *_passes(prefix),
    )


def _precision(prefix: str, *, in_schema: bool) -> tuple[Entry, ...]:
    if in_schema:
        return (
            honoured(
                f"{prefix}.model_dtype",
                effect="4 or 2 bytes a parameter, and twice that for the optimizer's state",
                advice="float32: updates of 1e-6 vanish in bfloat16 weights",
            ),
            honoured(
                f"{prefix}.dtype",
                effect="bfloat16 halves activations and is several times faster on accelerators",
            ),
        )
    actors = "the reference is computed in the actor's precision"
    return (
        inapplicable(f"{prefix}.model_dtype", str, "fp32", "Dtype of the weights.", actors),
        inapplicable(f"{prefix}.dtype", str, "bfloat16", "Dtype of the passes.", actors),
    )


_SHARDING: tuple[Entry, ...] = (
    inapplicable(
        "param_offload",
        bool,
        False,
        "Move weights to the host while unused.",
        _ON_DEVICE,
        silent=(False,),
        effect="In verl: room for the engine on shared devices, slower phases",
        advice="Needed where engine and trainer share devices; here they do not",
    ),
    inapplicable(
        "optimizer_offload",
        bool,
        False,
        "Move the optimizer's state to the host while unused.",
        _ON_DEVICE,
        silent=(False,),
    ),
    inapplicable(
        "offload_policy",
        bool,
        False,
        "FSDP2's own offload to the host.",
        _ON_DEVICE,
        silent=(False,),
    ),
    inapplicable(
        "reshard_after_forward",
        bool,
        True,
        "Free gathered weights after the forward pass.",
        _WHOLE,
    ),
    inapplicable(
        "fsdp_size",
        int,
        -1,
        "Ranks that share one copy; -1: all.",
        _WHOLE,
        silent=(1,),
    ),
    inapplicable(
        "forward_prefetch",
        bool,
        False,
        "Gather the next layer early.",
        _WHOLE,
        silent=(False,),
    ),
    inapplicable(
        "wrap_policy.min_num_params",
        int,
        0,
        "Smallest unit of sharding.",
        _WHOLE,
    ),
    *group(
        "wrap_policy",
        {"transformer_layer_cls_to_wrap": None, "disable": False},
        "Units of sharding.",
        _WHOLE,
    ),
    block(
        "mixed_precision",
        "Dtypes of parameters, reductions and buffers.",
        "dtype is for the passes and model_dtype for weights and reductions",
    ),
    inapplicable(
        "ulysses_sequence_parallel_size",
        int,
        1,
        "Devices that share one sequence (Ulysses).",
        "a sequence stays on one rank, so data-parallel ranks are all ranks",
        silent=(1,),
        effect="In verl: activation memory of long rows divided by it",
    ),
    inapplicable(
        "use_orig_params",
        bool,
        False,
        "Keep original parameters.",
        _WHOLE,
        silent=(False,),
    ),
    inapplicable("forward_only", bool, False, "No backward pass.", _WHOLE, silent=(False,)),
    inapplicable("strategy", str, "fsdp", "Sharding library.", _WHOLE),
    inapplicable(
        "use_no_sync_for_gradient_accumulation",
        bool,
        True,
        "Reduce gradients once a mini-batch.",
        "gradients are always reduced once a mini-batch",
        silent=(True,),
    ),
    block("turbo_config", "Sharding library of its own.", _WHOLE),
)


def _sharding(prefix: str) -> tuple[Entry, ...]:
    return below(prefix, _SHARDING)


def _passes(prefix: str) -> tuple[Entry, ...]:
    return (
        inapplicable(
            f"{prefix}.seed", int, 42, "Seed of the trainer's ranks.", "trainer.seed holds"
        ),
        inapplicable(
            f"{prefix}.full_determinism",
            bool,
            False,
            "Only repeatable kernels.",
            "a synchronous run repeats (sluice.asynchrony.max_staleness=0)",
            silent=(False,),
        ),
        inapplicable(
            f"{prefix}.use_torch_compile",
            bool,
            True,
            "Compile the loss's parts.",
            "nothing is compiled",
            silent=(False,),
        ),
        inapplicable(
            f"{prefix}.entropy_from_logits_with_chunking",
            bool,
            False,
            "Entropy in chunks of rows.",
            _ENTROPY,
            silent=(True, False),
            effect="Less peak memory where the vocabulary is large",
        ),
        inapplicable(
            f"{prefix}.entropy_from_logits_chunk_size", int, 2048, "Rows of a chunk.", _ENTROPY
        ),
        inapplicable(
            f"{prefix}.entropy_checkpointing",
            bool,
            False,
            "Compute entropy again in the backward pass.",
            "the backward pass always computes it again",
            silent=(True, False),
        ),
        inapplicable(
            f"{prefix}.pad_to_length",
            bool | int,
            False,
            "Pad rows to one length.",
            "rows are packed without padding",
            silent=(False,),
        ),
        inapplicable(
            f"{prefix}.pad_to_length_bucket",
            int,
            1024,
            "Step of that length.",
            "rows are packed without padding",
        ),
        block(f"{prefix}.qat", "Training aware of quantisation.", "weights are not quantised"),
    )


ENTRIES: tuple[Entry, ...] = (
    *sharding_entries("actor_rollout_ref.actor.fsdp_config", precision_in_schema=True),
    *sharding_entries("actor_rollout_ref.ref.fsdp_config", precision_in_schema=False),
    *sharding_entries("critic.fsdp", precision_in_schema=True),
)
