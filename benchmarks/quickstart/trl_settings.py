"""What the TRL baseline runs: the quickstart's DAPO job, and how TRL is set up for speed."""

from __future__ import annotations

from dataclasses import dataclass

# The one schedule of transformers with a linear decay that ends above zero.
LR_SCHEDULE = "warmup_stable_decay"


@dataclass(frozen=True, slots=True)
class DapoJob:
    """The job both systems train; sizes in groups, completions, tokens or optimizer steps."""

    group_size: int = 8
    batch_groups: int = 64
    steps_per_batch: int = 2
    max_response_tokens: int = 56
    overlong_buffer_tokens: int = 8
    overlong_penalty_factor: float = 1.0
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule_batches: int = 20
    min_lr_ratio: float = 0.5
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    temperature: float = 1.0
    samples_per_held_out: int = 2

    @property
    def batch_completions(self) -> int:
        """Completions one generation makes."""
        return self.batch_groups * self.group_size

    @property
    def step_completions(self) -> int:
        """Completions one optimizer step uses."""
        return self.batch_completions // self.steps_per_batch

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps until the learning rate has decayed."""
        return self.schedule_batches * self.steps_per_batch


def lr_schedule_arguments(job: DapoJob) -> dict[str, object]:
    """Return arguments of `LR_SCHEDULE`; the plateau is fixed, independent of the step bound."""
    return {
        "num_stable_steps": 0,
        "num_decay_steps": job.schedule_steps - job.warmup_steps,
        "decay_type": "linear",
        "min_lr_ratio": job.min_lr_ratio,
    }


@dataclass(frozen=True, slots=True)
class TrlTuning:
    """Settings that change TRL's speed and not what it computes; defaults measured fastest.

    `processes` are data-parallel ranks of `threads` torch threads each; `micro_batch` is in
    completions a rank; `cache` is a transformers cache implementation ("" is theirs).
    """

    processes: int = 2
    threads: int = 1
    micro_batch: int = 128
    attention: str = "sdpa"
    bf16: bool = False
    cache: str = ""
    continuous_batching: bool = False
