"""Agents that nobody here wrote train a run: programs of `openai`, `openai-agents`, `smolagents`.

Each plays the jar game, whose jars only its own tool knows, on samples that `sluice agents run`
leases for it. The first two print no reward, so the row's scorer grades the last answer; the third
prints one.
"""

from __future__ import annotations

import json
import os
import shlex
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
from tests.support.source_tree import ROOT

PROGRAMS = Path(__file__).with_name("programs")
SLUICE = (sys.executable, "-m", "sluice.cli.main")
JOB = ROOT / "sluice" / "quickstart" / "quickstart.yaml"
STEPS = 2
STOPS_S, ENDS_S, FOLLOWS_S = 60.0, 900.0, 60.0
LONG_CONTEXT = 6144

pytestmark = pytest.mark.timeout(ENDS_S + FOLLOWS_S + 2 * STOPS_S, func_only=True)


@dataclass(frozen=True, slots=True)
class Played:
    """What a run left behind that agents have played.

    Attributes:
        rows: metrics of its steps.
        groups: that it trained.
        run_log: what its services wrote.
        agents_log: what `sluice agents run` printed.
    """

    rows: tuple[dict[str, Any], ...]
    groups: tuple[dict[str, Any], ...]
    run_log: str
    agents_log: str

    @property
    def roots(self) -> list[int]:
        """The roots of each trained episode."""
        return [one["roots"] for group in self.groups for one in group["episodes"]]

    @property
    def turns(self) -> list[int]:
        """The turns of each trained episode."""
        return [one["turns"] for group in self.groups for one in group["episodes"]]


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
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "sluice.rollout.replicas=1",
        "sluice.asynchrony.max_staleness=0",
        "sluice.environment.agents=true",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
        *more,
    ]


def play(folder: Path, program: str, overrides: list[str]) -> Played:
    """Start the agents, then their run; return once both have ended."""
    run_dir = folder / "run"
    agent = shlex.join([os.environ["SLUICE_AGENTS_PYTHON"], str(PROGRAMS / program)])
    agents = ("agents", "run", str(run_dir), "--command", agent, "--parallel", "4")
    up = ("up", str(JOB), f"sluice.run_dir={run_dir}", *overrides)
    with command(folder / "agents.log", *agents) as playing:
        with command(folder / "up.log", *up) as run:
            code = run.wait(ENDS_S)
        run_log = "\n".join(file.read_text() for file in run_dir.glob("logs/*.log"))
        assert code == 0, (folder / "up.log").read_text()[-4000:] + run_log[-4000:]
        code = playing.wait(FOLLOWS_S)
    agents_log = (folder / "agents.log").read_text()
    assert code == 0, agents_log[-4000:]
    groups = [json.loads(line) for line in (run_dir / "groups.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Played(
        tuple(row for row in rows if "training/global_step" in row),
        tuple(one for one in groups if one["end"] == "trained"),
        run_log,
        agents_log,
    )


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


def check_trained(played: Played) -> None:
    """The run trained each token that agents sampled once, and published what it learned."""
    assert len(played.rows) == STEPS
    assert all(row["actor/grad_norm"] > 0 for row in played.rows)
    # With no staleness the last step trains what the weights of the step before have sampled.
    assert max(group["oldest_version"] for group in played.groups) == STEPS - 1
    sampled = sum(sum(group["tokens"]) for group in played.groups)
    assert sum(row["train/trained_tokens"] for row in played.rows) == sampled
    assert sum(row["episodes/tokens_sampled"] for row in played.rows) == sampled
    assert all(0 < group["right"] < group["scored"] for group in played.groups)
    assert max(played.turns) > 1
    # The agents were there first, and left with the run.
    assert "nothing was started there yet" in played.agents_log
    assert played.agents_log.splitlines()[-1].startswith("ended: 0 agents run, ")
    assert ", 0 failed" in played.agents_log.splitlines()[-1], played.agents_log


@pytest.mark.parametrize("program", ["with_openai.py", "with_openai_agents.py"])
def test_an_agent_that_keeps_its_history_trains_one_root_per_episode(
    program: str, assets: QuickstartAssets, tmp_path: Path
) -> None:
    played = play(tmp_path, program, settings(assets))
    check_trained(played)
    assert set(played.roots) == {1}
    assert "turns begin new roots" not in played.run_log


def test_an_agent_that_rewrites_its_history_trains_several_roots_and_the_run_says_so(
    assets: QuickstartAssets, tmp_path: Path
) -> None:
    # Its prompts have thousands of tokens in this tokenizer.
    model = tmp_path / "model"
    shutil.copytree(assets.model_dir, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = LONG_CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    overrides = settings(
        assets,
        f"actor_rollout_ref.model.path={model}",
        f"data.max_prompt_length={LONG_CONTEXT - 256}",
        "data.max_response_length=256",
        # A pass of the trainer takes an episode with all its roots.
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={3 * LONG_CONTEXT}",
    )
    played = play(tmp_path, "with_smolagents.py", overrides)
    check_trained(played)
    assert max(played.roots) > 1
    assert "a conversation continues none of the sample's answers" in played.run_log
    assert "mean reward" in played.agents_log
