"""Agents that nobody here wrote train a run: programs of `openai`, `openai-agents`, `smolagents`.

Each plays the jar game, whose jars only its own tool knows, and reports no reward: the row's scorer
grades the last answer.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sluice.quickstart.prepare import QuickstartAssets, prepare
from tests.support.small_run import SCORER
from tests.support.source_tree import ROOT

LOOPS = Path(__file__).with_name("agent_loops.py")
SLUICE = (sys.executable, "-m", "sluice.cli.main")
JOB = ROOT / "sluice" / "quickstart" / "quickstart.yaml"
STOPS_S, ENDS_S = 60.0, 500.0
LONG_CONTEXT = 6144


@dataclass(frozen=True, slots=True)
class Played:
    """What a run left behind that agents have played."""

    steps: int
    groups: tuple[dict[str, Any], ...]
    logs: str

    @property
    def episodes(self) -> list[dict[str, Any]]:
        """The episodes of trained groups."""
        return [one for group in self.groups for one in group["episodes"]]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> QuickstartAssets:
    """The tiny model that half knows the game, and its data."""
    folder = tmp_path_factory.mktemp("assets")
    return prepare(folder, task="jars", seed=0, progress=lambda _: None)


def settings(assets: QuickstartAssets, *more: str) -> list[str]:
    """A short run of the job, with few samples: each starts a program."""
    return [
        f"actor_rollout_ref.model.path={assets.model_dir}",
        f"data.train_files={assets.train_file}",
        "data.max_prompt_length=48",
        "data.max_response_length=224",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "sluice.rollout.replicas=1",
        "sluice.asynchrony.max_staleness=0",
        "sluice.environment.call_timeout_s=300",  # programs start slowly on a busy machine
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
        *more,
    ]


def play(run_dir: Path, program: str, overrides: list[str]) -> Played:
    """Run to the end."""
    environment = (f"sluice.environment.path={LOOPS}", f"sluice.environment.name={program}")
    words = ("up", str(JOB), f"sluice.run_dir={run_dir}", *overrides, *environment)
    with command(run_dir.parent / "up.log", *words) as run:
        code = run.wait(ENDS_S)
    logs = "\n".join(
        file.read_text() for file in (*run_dir.glob("logs/*.log"), *run_dir.parent.glob("*.log"))
    )
    assert code == 0, logs[-4000:]
    groups = [json.loads(line) for line in (run_dir / "groups.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sum("training/global_step" in row for row in rows)
    return Played(steps, tuple(one for one in groups if one["end"] == "trained"), logs)


@contextmanager
def command(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of sluice, interrupted at the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*SLUICE, *words], stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(STOPS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.mark.parametrize("program", ["with_openai", "with_openai_agents"])
def test_an_agent_that_keeps_its_history_trains_one_root_per_episode(
    program: str, assets: QuickstartAssets, tmp_path: Path
) -> None:
    played = play(tmp_path / "run", program, settings(assets))
    assert played.steps == 2
    assert played.episodes
    assert {one["roots"] for one in played.episodes} == {1}
    assert max(one["turns"] for one in played.episodes) > 1
    # Groups are mixed only because the row's scorer tells right answers from wrong ones.
    assert all(0 < group["right"] < group["scored"] for group in played.groups)


def test_an_agent_that_rewrites_its_history_trains_several_roots(
    assets: QuickstartAssets, tmp_path: Path
) -> None:
    # Its prompts have thousands of tokens in this tokenizer.
    model = tmp_path / "model"
    shutil.copytree(assets.model_dir, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = LONG_CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    # Whatever the model says to so strange a prompt, about half of it is right.
    (tmp_path / "scorer.py").write_text(SCORER)
    overrides = settings(
        assets,
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={tmp_path / 'scorer.py'}",
        f"data.max_prompt_length={LONG_CONTEXT - 256}",
        "data.max_response_length=256",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={LONG_CONTEXT}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
    )
    played = play(tmp_path / "run", "with_smolagents", overrides)
    assert played.steps == 2
    assert max(one["roots"] for one in played.episodes) > 1
