"""Small simulations for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.simulator.group_records import GroupRecord
from sluice.algorithm.sampling.rules import OnPolicyFill, SamplingRules, StrategyName
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.recorder import SimulationRecorder, TokenCause
from sluice.simulate.settings import FleetSettings, SimulationSettings, TrainerSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from sluice.types import PromptEnd

ENDS = {
    TokenCause.TRAINED: PromptEnd.TRAINED,
    TokenCause.ALL_RIGHT: PromptEnd.FILTERED_ALL_RIGHT,
    TokenCause.ALL_WRONG: PromptEnd.FILTERED_ALL_WRONG,
    TokenCause.STALE: PromptEnd.DROPPED_STALE,
    TokenCause.SURPLUS: PromptEnd.DROPPED_SURPLUS,
}
FLEET = FleetSettings(num_replicas=2, slots=16, base_step_s=0.01, per_sequence_s=0.0005)
TRAINER = TrainerSettings(train_s=2.0, publish_s=0.5, stall_s=0.2)


class SmallWorkload:
    """Half of the prompts are mixed mostly, a quarter each too hard and too easy; short answers."""

    def __init__(self, seed: int = 0, num_prompts: int = 64) -> None:
        self._seed, self._num_prompts = seed, num_prompts

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        number = position % self._num_prompts
        rate = (0.0, 0.5, 1.0, 0.4)[number % 4]
        return SimulatedPrompt(str(number), rate, number % 5 == 1, number)

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        draws = np.random.default_rng([self._seed, position, num_restarts])
        scale = 400 if prompt.is_long else 60
        tokens = 1 + draws.poisson(scale * draws.random(num_samples))
        are_right = draws.random(num_samples) < prompt.pass_rate
        return SimulatedSamples(tokens.tolist(), are_right.tolist())


def small(
    strategy: StrategyName = StrategyName.STREAM,
    *,
    batch_size: int = 6,
    max_staleness: int = 1,
    group_size: int = 4,
    num_steps: int = 12,
    on_policy_fill: OnPolicyFill = "exact",
    **others: object,
) -> SimulationSettings:
    bound = 0 if strategy is StrategyName.ROUNDS else max_staleness
    rules = SamplingRules(
        strategy,
        batch_size,
        bound,
        group_size,
        batch_size,
        probe_samples=min(2, group_size - 1),
        on_policy_fill=on_policy_fill,
    )
    settings = {"fleet": FLEET, "trainer": TRAINER, "num_steps": num_steps} | others
    return SimulationSettings(rules, **settings)


def recorded_group(**changes: object) -> GroupRecord:
    """Four samples of 10 to 40 tokens in the first second, the first two of them right."""
    usual = {
        "prompt_id": "p",
        "key": "k",
        "end": "trained",
        "right": 2,
        "scored": 4,
        "tokens": [10, 20, 30, 40],
        "version": 0,
        "oldest_version": 0,
        "started_s": 0.0,
        "generated_s": 1.0,
        "ended_s": 1.0,
        "replicas": [],
        "probes": 0,
        "probability": 1.0,
        "instance_id": "x",
    }
    return GroupRecord(**(usual | changes))


class RecordedRun:
    """Writes what a simulation did as the services write what a run did."""

    def __init__(self) -> None:
        self.recorder = SimulationRecorder(on_end=self._ended)
        self._lines: list[dict[str, object]] = []

    def _ended(self, group: SimulatedGroup, cause: TokenCause, now: float) -> None:
        self._lines.append(
            {
                "prompt_id": group.name,
                "key": group.prompt.key,
                "end": ENDS[cause].value,
                "right": group.num_right,
                "scored": group.num_asked,
                "tokens": group.samples.tokens[: group.num_asked],
                "version": group.issued_version,
                "oldest_version": group.oldest_version,
                "started_s": group.issued_s,
                "generated_s": group.generated_s,
                "ended_s": now,
                "replicas": [f"replica-{number}" for number in group.replicas],
                "probes": 0,
                "probability": 1.0,
                "instance_id": "x",
            }
        )

    def write(
        self, folder: Path, num_replicas: int, stall_s: float, handover_s: float = 0.0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(line) + "\n" for line in self._lines]
        (folder / "groups.jsonl").write_text("".join(lines), encoding="utf-8")
        rows = [json.dumps(row) + "\n" for row in self._rows(num_replicas, stall_s, handover_s)]
        (folder / "metrics.jsonl").write_text("".join(rows), encoding="utf-8")

    def _rows(self, num_replicas: int, stall_s: float, handover_s: float) -> list[dict[str, float]]:
        rows, generated, busy_s = [], 0.0, 0.0
        pairs = zip(self.recorder.steps, self.recorder.marks, strict=True)
        generated_at_lease = trained_at_lease = ended_s = 0.0
        for number, (step, mark) in enumerate(pairs, 1):
            # Where publications overlap steps, this is as long as from request to request.
            step_s = step.published_s - ended_s
            wait_s, train_s = step.leased_s - step.asked_s, step.trained_s - step.leased_s
            rows.append(
                {
                    "step": number,
                    "training/global_step": number,
                    "timing_s/step": step_s,
                    "timing_s/train": train_s,
                    "timing_s/wait_batch": wait_s,
                    "timing_s/wait_groups": wait_s - handover_s,
                    "timing_s/update_weights": step_s - wait_s - train_s,
                    "weights/stall_s": stall_s,
                    "weights/delivery_s": step.published_s - step.trained_s,
                    "rollout/replicas": num_replicas,
                    "rollout/idle_share": 1.0 - (step.busy_s - busy_s) / (step_s * num_replicas),
                    "rollout/tokens_per_s": (step.generated - generated) / step_s,
                    "train/generated_tokens": mark.generated - generated_at_lease,
                    "train/trained_tokens": mark.trained - trained_at_lease,
                }
            )
            generated, busy_s, ended_s = step.generated, step.busy_s, step.published_s
            generated_at_lease, trained_at_lease = mark.generated, mark.trained
        return rows
