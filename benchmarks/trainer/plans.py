"""Plans of every launch of tests/data/launches on its devices, and plans against real ranks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reporting import ROOT, print_line
from sluice.config.memory.rollout import GIB
from tests.support.plan_parity import (
    DENSE,
    EXPERTS,
    counted_and_planned,
    trained_and_planned,
)

_LAUNCHES = ROOT / "tests" / "data" / "launches"
_ACTOR = "actor_rollout_ref.actor"
_ON_DEVICE = tuple(
    f"{_ACTOR}.{key}=False"
    for key in (
        "optim.override_optimizer_config.optimizer_cpu_offload",
        "megatron.optimizer_offload",
        "megatron.param_offload",
        "megatron.grad_offload",
    )
)
_OFFLOADED = "dapo-qwen3-235b-megatron"
NO_OFFLOAD = "-without-offload"
"""Ends the names of plans that need not fit."""


def planned(name: str, model: str, gib: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of one launch."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "sluice", "plan", str(_LAUNCHES / f"{name}.overrides")),
            *("--device", f"{gib}GB", "--model", model, "--json", *overrides),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if not ended.stdout:
        raise SystemExit(ended.stderr)
    found = json.loads(ended.stdout.splitlines()[-1])
    fits_with = found["fits_with"]
    return {
        "fits": fits_with is not None,
        "as_written": found["fits"],
        "fits_with": fits_with,
        "lacks": found["lacks"],
        "split": f"{found['split']['trainer']}+{found['split']['rollout']}",
        "peak_gib": round(max(found["peaks"]["trainer"].values()) / GIB, 1),
        "engine_gib": round(max(found["peaks"]["rollout"].values()) / GIB, 1),
        "seconds": found["seconds"],
        "most_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2),
    }


def plans() -> dict[str, Any]:
    """Return figures of all plans by name.

    ``fits`` is true also with the overrides that `sluice plan` prints; ``most_gb`` is the largest
    process, as the system counted it.
    """
    devices = json.loads((_LAUNCHES / "devices.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, row in devices.items():
        for gib in dict.fromkeys((row["device_gib"], row.get("also_gib", row["device_gib"]))):
            key = name if gib == row["device_gib"] else f"{name}@{gib}"
            found[key] = planned(name, row["model"], gib)
            print_line(f"{key}: {found[key]}")
            if name == _OFFLOADED:
                key += NO_OFFLOAD
                found[key] = planned(name, row["model"], gib, _ON_DEVICE)
                print_line(f"{key}: {found[key]}")
    return {"plans": found}


# Model, ranks, recompute, FSDP's keys.
_AGAINST_RANKS: tuple[tuple[dict[str, Any], int, bool, dict[str, Any]], ...] = (
    (DENSE, 4, False, {}),
    (DENSE, 8, True, {"fsdp_size": 4}),
    (DENSE, 8, False, {"ulysses_sequence_parallel_size": 4}),
    (DENSE, 4, True, {"pipeline_parallel_size": 4}),
    (DENSE, 8, False, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    (EXPERTS, 4, False, {"expert_parallel_size": 4}),
    (
        EXPERTS,
        8,
        True,
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 4},
    ),
    (
        EXPERTS,
        8,
        False,
        {
            "pipeline_parallel_size": 2,
            "ulysses_sequence_parallel_size": 2,
            "expert_parallel_size": 2,
        },
    ),
    (EXPERTS, 8, True, {"expert_parallel_size": 4, "ulysses_sequence_parallel_size": 2}),
    (
        EXPERTS,
        8,
        False,
        {"fsdp_size": 4, "expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2},
    ),
)


def plan_errors() -> dict[str, Any]:
    """Return the largest relative error of a plan's bytes: state, peaks, kept, moved.

    Each stage that differs is compared. A pipeline's peak is that of a real step too, with as many
    micro-batches in flight as it has.
    """
    worst = 0.0
    for model, ranks, recompute, keys in _AGAINST_RANKS:
        peaks: list[int] = []
        if "pipeline_parallel_size" in keys:
            real, peaks, planned = trained_and_planned(model, ranks, recompute=recompute, **keys)
        else:
            real, planned = counted_and_planned(model, ranks, recompute=recompute, **keys)
        theirs, ours = _figures(real), _figures(planned)
        if ours.keys() != theirs.keys():
            raise SystemExit(f"the plan counts {sorted(ours)}, the ranks {sorted(theirs)}")
        for number, (peak, stage) in enumerate(zip(peaks, planned, strict=False)):
            name = f"a step of {number}"
            theirs[name], ours[name] = peak, max(stage["forward"], stage["backward"])
        errors = {key: abs(ours[key] - size) / max(1, size) for key, size in theirs.items()}
        print_line(
            f"{model['model_type']}, {ranks} ranks, {keys}: plan's errors "
            f"{ {key: round(error, 4) for key, error in errors.items() if error} }"
        )
        worst = max(worst, *errors.values())
    return {"plan_error_worst": round(worst, 4)}


def _figures(stages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the figures of all stages that differ, by name and the stage's place among them."""
    return {
        f"{key} of {number}": size
        for number, one in enumerate(stages)
        for key, size in {**one, **one["moved"]}.items()
        if key != "moved"
    }
