"""`fsdp_config.*` of actor, reference and critic: precision, and how ranks share it (FSDP2)."""

from __future__ import annotations

from sluice.config.catalogue.entry import Entry, below, block, group, honoured, inapplicable

_FSDP2 = "FSDP2 cuts by parameter and needs no such choice"
_BY_LAYER = "each decoder layer is a unit, and what is outside of them is one"
_LIKE_ACTOR = "the reference is sharded like the actor"
_ON_DEVICE = "weights and optimizer state stay on the device of their rank"
_ENTROPY = "entropy is taken in slices of a micro-batch anyway"


def sharding_entries(prefix: str, *, precision_in_schema: bool) -> tuple[Entry, ...]:
    """Rows for one block of FSDP keys."""
    return (
        *_precision(prefix, in_schema=precision_in_schema),
        *_shared(prefix, in_schema=precision_in_schema),
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
                effect="bfloat16 halves activations and is faster on accelerators",
            ),
        )
    actors = "the reference is computed in the actor's precision"
    return (
        inapplicable(f"{prefix}.model_dtype", str, "fp32", "Dtype of the weights.", actors),
        inapplicable(f"{prefix}.dtype", str, "bfloat16", "Dtype of the passes.", actors),
    )


def _shared(prefix: str, *, in_schema: bool) -> tuple[Entry, ...]:
    if in_schema:
        return (
            honoured(
                f"{prefix}.fsdp_size",
                unit="ranks",
                effect="Memory of weights, gradients and optimizer state is divided by it; each "
                "pass gathers every layer from as many ranks",
                advice="A divisor of the trainer's ranks. 1, where the whole model fits, gathers "
                "nothing",
            ),
            honoured(
                f"{prefix}.reshard_after_forward",
                effect="True: a layer at a time is whole, and gathered twice a micro-batch; false: "
                "all are whole until the backward pass, gathered once",
            ),
            honoured(
                f"{prefix}.use_no_sync_for_gradient_accumulation",
                effect="True: whole gradients on each rank during a mini-batch of several "
                "micro-batches, one sum over ranks; false: shards of them, a sum each",
                advice="false where gradients are what does not fit",
            ),
        )
    return (
        inapplicable(
            f"{prefix}.fsdp_size", int, -1, "Ranks that share one copy; -1: all.", _LIKE_ACTOR
        ),
        inapplicable(
            f"{prefix}.reshard_after_forward",
            bool,
            True,
            "Free gathered weights after the forward pass.",
            _LIKE_ACTOR,
        ),
        inapplicable(
            f"{prefix}.use_no_sync_for_gradient_accumulation",
            bool,
            True,
            "Sum gradients over ranks once a mini-batch.",
            "the reference has no gradients",
            silent=(True,),
        ),
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
        "forward_prefetch",
        bool,
        False,
        "Gather the next layer early.",
        _FSDP2,
        silent=(False,),
    ),
    inapplicable(
        "wrap_policy.min_num_params",
        int,
        0,
        "Smallest unit of sharding.",
        _BY_LAYER,
    ),
    *group(
        "wrap_policy",
        {"transformer_layer_cls_to_wrap": None, "disable": False},
        "Units of sharding.",
        _BY_LAYER,
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
        _FSDP2,
        silent=(False,),
    ),
    inapplicable(
        "forward_only",
        bool,
        False,
        "No backward pass.",
        "the reference makes none, actor and critic do",
        silent=(False,),
    ),
    inapplicable(
        "strategy",
        str,
        "fsdp",
        "Sharding library.",
        "ranks that share a model do so by FSDP2",
        silent=("fsdp", "fsdp2"),
    ),
    block("turbo_config", "Sharding library of its own.", "ranks share a model by FSDP2"),
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
            "a synchronous run of the torch engine repeats (sluice.asynchrony.max_staleness=0)",
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
