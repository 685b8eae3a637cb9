"""Two sources of prompts at 3:1, the smaller one ten times slower."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.reporting import empty_run_folder, print_line, quickstart

MOST: Mapping[str, float] = {"share_error": 0.1}

_SHARES = {"fast": 0.75, "slow": 0.25}
_STEPS, _SLOW_S = 12, 6.0
"""A group of the quickstart takes about half a second."""
_WORLD = f"""
import asyncio

class Slow:
    def reset(self, **row):
        pass

    async def turn(self, answer: str) -> None:
        await asyncio.sleep({_SLOW_S})
"""


def measure(folder: Path) -> Mapping[str, Any]:
    """Train some steps; return the largest relative error of a source's share of the groups."""
    run_dir, trained = folder / "sources", folder / "sources" / "trained"
    empty_run_folder(run_dir, folder / "assets", "quickstart", 0)
    world = folder / "slow_world.py"
    world.write_text(_WORLD, encoding="utf-8")
    prompts = _split(folder)
    settings = [
        "data.train_files=null",
        f"trainer.total_training_steps={_STEPS}",
        f"trainer.rollout_data_dir={trained}",
        "trainer.val_before_train=false",
        "trainer.test_freq=1000",
        "trainer.save_freq=1000",
        f"sluice.environment.path={world}",
        "sluice.sources.slow.environment=Slow",
        "sluice.sources.fast.environment=single_turn_agent",
    ]
    for name, share in _SHARES.items():
        settings += [
            f"sluice.sources.{name}.files={_file(folder, name)}",
            f"sluice.sources.{name}.share={share}",
        ]
    quickstart(run_dir, 0, settings)
    counts = Counter(
        prompts[json.loads(line)["input"]]
        for file in trained.glob("*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    )
    print_line(f"trained samples: {dict(counts)}")
    total = counts.total()
    return {
        "share_error": max(abs(counts[n] / total - share) / share for n, share in _SHARES.items())
    }


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def _split(folder: Path) -> dict[str, str]:
    """Write the training problems to a file for each source; return each problem's source."""
    rows = pq.read_table(folder / "assets" / "data" / "train.parquet")
    problems = [prompt[0]["content"] for prompt in rows["prompt"].to_pylist()]
    found = dict(zip(dict.fromkeys(problems), cycle(_SHARES)))  # some problems come twice
    for name in _SHARES:
        own = pa.array([found[problem] == name for problem in problems])
        pq.write_table(rows.filter(own), _file(folder, name))
    return found
