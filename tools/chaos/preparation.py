"""The task of a run under chaos, and its settings beside the quickstart's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.launch.service_spec import with_ports
from sluice.quickstart.prepare import prepare
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, WarmStartSettings

DUMPS, RUN = "dumps", "run"
_SCORER = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": right, "acc": right}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """One size of run: what is made, what is overridden, how long throughput is averaged."""

    task: str
    preparation: PrepareSettings
    overrides: tuple[str, ...]
    has_chance_scorer: bool
    window_s: float


SIZES = {
    # The model knows nothing; an answer is right by the parity of its checksum.
    "tiny": Size(
        "quickstart",
        PrepareSettings(
            num_train=4_000,
            num_held_out=16,
            num_tokenizer_dialogues=100,
            warm_start=WarmStartSettings(max_hold_steps=1, warmup_steps=1, decay_steps=1),
        ),
        (
            "data.train_batch_size=4",
            "data.max_response_length=8",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.max_num_seqs=32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            # So slow that it never learns the checksum, and groups stay mixed.
            "actor_rollout_ref.actor.optim.lr=0.00001",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
            "reward.reward_kwargs.overlong_buffer_cfg.len=4",
        ),
        has_chance_scorer=True,
        window_s=4.0,
    ),
    # The quickstart's harder task, which is not solved within minutes: groups stay mixed.
    "stretch": Size(
        "stretch",
        PrepareSettings(),
        (
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        ),
        has_chance_scorer=False,
        window_s=10.0,
    ),
}
# Deadlines that a run of minutes can reach.
_COMMON = (
    "trainer.total_training_steps=1000000",
    "trainer.total_epochs=1000000",
    "trainer.save_freq=5",
    "trainer.test_freq=1000000",  # after the last batch
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "reward.scorer_pool.num_workers=1",
    "sluice.rollout.replicas=2",
    "sluice.trainer.min_replicas=1",
    "sluice.trainer.replica_ttl_s=4",
    "sluice.trainer.replica_stall_s=20",
    "sluice.trainer.replica_wait_timeout_s=120",
    "sluice.trainer.batch_timeout_s=120",
    "sluice.reward.generate_timeout_s=60",
    "sluice.reward.stall_timeout_s=10",
    "sluice.weights.timeout_s=10",
    "sluice.shutdown_grace_s=30",
)


def prepare_run(folder: Path, size: Size, *, seed: int, host: str) -> tuple[RunConfig, Path]:
    """Make model and data, and write the configuration, with ports.

    Args:
        folder: gets ``assets``, ``dumps``, ``run.yaml`` and, from the run, ``run``.
        size: of all that.
        seed: of model, data and sampling.
        host: where trainer and reward service listen.
    """
    assets = prepare(
        folder / "assets", task=size.task, seed=seed, progress=_silent, settings=size.preparation
    )
    overrides = [
        *(f"{key}.endpoint.host={host}" for key in ("sluice.trainer", "sluice.reward")),
        f"actor_rollout_ref.model.path={assets.model_dir.absolute()}",
        f"data.train_files={assets.train_file.absolute()}",
        f"data.val_files={assets.val_file.absolute()}",
        f"data.max_prompt_length={assets.task.max_prompt_tokens}",
        f"data.max_response_length={assets.task.max_response_tokens}",
        f"reward.reward_kwargs.overlong_buffer_cfg.len={assets.task.overlong_buffer_tokens}",
        *(f"{key}.seed={seed}" for key in ("data", "actor_rollout_ref.rollout", "trainer")),
        f"sluice.run_dir={(folder / RUN).absolute()}",
        f"trainer.rollout_data_dir={(folder / DUMPS).absolute()}",
        *_COMMON,
        *size.overrides,
    ]
    if size.has_chance_scorer:
        (folder / "scorer.py").write_text(_SCORER, encoding="utf-8")
        scorer = (folder / "scorer.py").absolute()
        overrides.append(f"reward.custom_reward_function.path={scorer}")
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as base:
        config = load_config(base, overrides)
    check_config(config)
    config = with_ports(config)
    write_config(config, folder / "run.yaml")
    return config, folder / "run.yaml"


def _silent(_progress: PrepareProgress) -> None:
    """The making of the model takes under a minute."""
