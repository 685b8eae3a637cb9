"""`actor_rollout_ref.ref.*` without sharding: the reference model of the KL terms."""

from __future__ import annotations

from sluice.config.catalogue.actor import STRATEGY, log_prob_entries
from sluice.config.catalogue.entry import Entry, block, group, inapplicable

_KEY = "actor_rollout_ref.ref"

ENTRIES: tuple[Entry, ...] = (
    inapplicable(
        f"{_KEY}.strategy",
        str,
        "fsdp",
        "Backend of the reference.",
        STRATEGY,
        verl_default="the actor's",
    ),
    *log_prob_entries(_KEY),
    inapplicable(
        f"{_KEY}.use_torch_compile",
        bool,
        True,
        "Compile log-probabilities.",
        "nothing is compiled",
        silent=(False,),
    ),
    inapplicable(f"{_KEY}.rollout_n", int, 1, "Copy of rollout.n.", "rollout.n holds"),
    inapplicable(
        f"{_KEY}.load_weight",
        bool,
        True,
        "Load weights at the start.",
        "they are loaded",
        silent=(True,),
    ),
    *group(
        f"{_KEY}.router_replay",
        {"mode": "disabled", "record_file": None, "replay_file": None},
        "Repeat the engine's routing of experts.",
        "routing is the model's own",
    ),
    block(f"{_KEY}.profiler", "Profiler of the reference.", "timings are in metrics.jsonl"),
    block(
        f"{_KEY}.model",
        "Reference other than the starting policy.",
        "the reference is the model in actor_rollout_ref.model.path",
    ),
)
