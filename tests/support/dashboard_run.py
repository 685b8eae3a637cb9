"""A run's folder as a run leaves it, made by hand: numbers, groups and samples that are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.telemetry.samples import SampleArchive, SampledGroup, SampledResponse

HOSTILE = '<img src=x onerror="document.title=1"><script>alert(1)</script>'
# Nobody listens there.
_NO_SERVICE = (
    "sluice.trainer.endpoint.port=1",
    "sluice.reward.endpoint.port=1",
)


def make_run(folder: Path, *overrides: str) -> Path:
    """The folder with a configuration, as of a run that was started and is gone."""
    settings = [f"sluice.run_dir={folder}", *_NO_SERVICE, *overrides]
    write_config(load_config(None, settings), folder / "config.yaml")
    return folder


def step_row(step: int, **metrics: float | None) -> dict[str, float | None]:
    """A line of a step, as the trainer writes it."""
    return {"step": step, "training/global_step": float(step), **metrics}


def add_lines(file: Path, rows: Sequence[object]) -> None:
    """Appends an object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def a_group(
    name: str,
    scores: Sequence[float | None] = (1.0, -1.0),
    *,
    end: str = "trained",
    step: int | None = None,
    version: int = 0,
    text: str = "the answer",
) -> SampledGroup:
    """A group whose responses begin with `text`, and have these scores (none: it failed)."""
    return SampledGroup(
        prompt_id=name,
        end=end,
        version=version,
        ended_at=1_700_000_000.0,
        prompt=f"prompt of {name}",
        step=step,
        ground_truth="7",
        data_source="sums",
        replicas=["rollout-0"],
        responses=[
            SampledResponse(
                f"{text} {number}",
                3,
                "stop",
                score,
                score,
                "" if score is not None else "scorer_timeout: too slow",
                (version, version),
            )
            for number, score in enumerate(scores)
        ],
    )


def add_groups(run_dir: Path, groups: Sequence[SampledGroup]) -> None:
    """Writes them into the archive of a run."""
    archive = SampleArchive(run_dir / "samples", 1 << 24)
    archive.append(msgspec.json.encode(group) for group in groups)


def fill_run(run_dir: Path) -> None:
    """Three steps, two validations, and a group of each kind."""
    rows = [
        {"step": 0, "val-core/sums/acc/mean@2": 0.25},
        step_row(1, **{"critic/rewards/mean": -0.5, "train/groups_kept": 4.0}),
        step_row(2, **{"critic/rewards/mean": 0.0, "train/groups_all_right": 2.0}),
        step_row(
            3,
            **{
                "critic/rewards/mean": 0.5,
                "rollout/tokens_per_s": 1234.0,
                "accounts/generated_tokens": 100.0,
                "accounts/tokens/trained": 60.0,
                "accounts/tokens/pending": 40.0,
                "accounts/tokens_residual": 0.0,
                "accounts/tokens_residual_share": 0.0,
            },
        ),
        {"step": 3, "val-core/sums/acc/mean@2": 0.75},
    ]
    add_lines(run_dir / "metrics.jsonl", rows)
    add_lines(
        run_dir / "groups.jsonl",
        [
            {"end": "trained", "step": 1, "oldest_version": 0},
            {"end": "trained", "step": 3, "oldest_version": 1},
            {"end": "filtered_all_wrong", "step": None, "oldest_version": 1},
        ],
    )
    add_groups(
        run_dir,
        [
            a_group("mixed", step=1),
            a_group("wrong", (-1.0, -1.0), end="filtered_all_wrong", version=1, text="a Pelican"),
            a_group("right", (1.0, 1.0), end="filtered_all_right", version=1),
            a_group("slow", (None, 1.0), end="dropped_failed", version=2, text=HOSTILE),
        ],
    )
