"""Measure how far the trainer's logprobs are from vLLM's, both in bfloat16 on the CPU.

vLLM samples from a random model and gives each token's logprob; a learner with the native layers
and one with transformers' layers compute the logprobs of the same tokens with the same weights.
Then the first one trains, on new samples of vLLM after every update, and both are measured again.
Every figure is a metric of every run (``training/rollout_*``, of a batch's first pass). Printed
last is one JSON object:

bf16_distance_ratio  k3 KL of native layers over that of transformers' layers; the worst of all
                     models, before and after training
bf16_drift_ratio     k3 KL of native layers after training over before; the worst of all models
models               by model and layers, before and after: mean and 99.9th percentile of the
                     absolute difference of logprobs, and k3 KL, in nats
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers import Fleet, PeerProcess
from benchmarks.reporting import print_line, print_report
from services.trainer.learner.learner import Learner
from services.trainer.learner.model import loading
from services.trainer.learner.ranks import ParallelContext
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tools.phases import tool_parser

OWN, TRANSFORMERS = "own", "transformers"
METRICS = {
    "mean": "training/rollout_logprobs_diff_mean",
    "p999": "training/rollout_logprobs_diff_p999",
    "k3": "training/rollout_k3_kl",
}
_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, Any] = _DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_FLOAT32_HEAD = "actor_rollout_ref.model.float32_head=true"
_REPLAY = "actor_rollout_ref.actor.router_replay.mode=R2"
PROMPT_TOKENS, SAMPLES = 32, 4
GROUPS, NEW_TOKENS = 8, 64
"""Of an update, which takes two optimizer steps."""

MEASURED_GROUPS, MEASURED_TOKENS = 32, 256
_SHARPNESS, _LEARNING_RATE = 2.0, 1e-3
_BUCKET_MB = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A model by its config.json, and overrides of a run: of all its parts, and of training."""

    shape: dict[str, Any]
    keys: tuple[str, ...] = ()
    training: tuple[str, ...] = ()


CASES = {
    "dense": Case(_DENSE),
    "dense_float32_head": Case(_DENSE, (_FLOAT32_HEAD,)),
    "moe": Case(_EXPERTS),
    "moe_r2": Case(_EXPERTS, training=(_REPLAY,)),
}


def save_model(case: Case, folder: Path) -> None:
    """Write a random model, the same in every run, with what a trained one has: norms that weigh,
    and a head that prefers some tokens.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.lm_head.weight.data.mul_(_SHARPNESS)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def _run_config(folder: Path, groups: int, mini_batch: int, more: Sequence[str]) -> RunConfig:
    keys = (
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"data.train_batch_size={groups}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={MEASURED_TOKENS}",
        "trainer.device=cpu",
    )
    return load_config(None, [*keys, *more])


class Engine:
    """vLLM in a process of its own, which gets its weights as a replica does.

    Args:
        python: of an environment with vLLM.
        folder: of the model.
        keys: overrides of the run.
    """

    def __init__(self, python: str, folder: Path, keys: Sequence[str]) -> None:
        self._seed = 0
        with ExitStack() as stack:
            process = PeerProcess("benchmarks.engine.peer", python)
            self._process = stack.enter_context(closing(process))
            start = {"engine": "vllm", "folder": str(folder), "dtype": "bfloat16", "slots": 64}
            tokens = PROMPT_TOKENS + MEASURED_TOKENS
            layout = process.call("start", **start, tokens=tokens, more=keys)["layout"]
            self._fleet = stack.enter_context(closing(Fleet([process], layout, _BUCKET_MB)))
            self._fleet.form(self._fleet.replicas)
            self._stack = stack.pop_all()

    def serve(self, learner: Learner) -> dict[str, torch.Tensor]:
        """Send a learner's weights; return them, in bfloat16."""
        weights = self._fleet.weights.tensors
        sent = dict(learner.parts())
        if sent.keys() != weights.keys():
            raise RuntimeError(f"other names: {sorted(sent.keys() ^ weights.keys())}")
        for name, tensor in sent.items():
            weights[name].copy_(tensor)
        self._fleet.update()
        return {name: tensor.clone() for name, tensor in weights.items()}

    def sample(self, vocabulary: int, groups: int, new_tokens: int) -> TrainBatch:
        """Return samples of random prompts. The reward wants tokens of the vocabulary's first half:
        a sample is right if it has more of them than the median of its group.
        """
        self._seed += 1
        random = np.random.default_rng(self._seed)
        prompts = random.integers(2, vocabulary, (groups, PROMPT_TOKENS)).tolist()
        seed = 1000 * self._seed
        found = self._process.call(
            "sample", prompts=prompts, samples=SAMPLES, new_tokens=new_tokens, seed=seed
        )["groups"]
        pairs = zip(prompts, found, strict=True)
        made = tuple(_group(prompt, sampled, vocabulary // 2) for prompt, sampled in pairs)
        return TrainBatch(f"batch-{seed}", 0, made, DataProgress(groups), {})

    def close(self) -> None:
        """End the process."""
        self._stack.close()


def _group(
    prompt: list[int], sampled: list[tuple[list[int], list[float]]], limit: int
) -> TrainGroup:
    shares = [float(np.mean(np.array(tokens) < limit)) for tokens, _ in sampled]
    middle = float(np.median(shares))
    rollouts = tuple(
        Rollout.of_one_turn(
            sample_index=index,
            token_ids=np.array(tokens, np.uint32),
            behavior_logprobs=np.array(logprobs, np.float32),
            version_spans=(VersionSpan(0, 0, len(tokens)),),
            finish_reason=FinishReason.LENGTH,
            text="",
        )
        for index, (tokens, logprobs) in enumerate(sampled)
    )
    rewards = [1.0 if share > middle else -1.0 for share in shares]
    scores = tuple(Scored(r, r, {"acc": share}) for r, share in zip(rewards, shares, strict=True))
    return TrainGroup(f"prompt-{prompt}", np.array(prompt, np.uint32), rollouts, scores, "made up")


def distances(folder: Path, batch: TrainBatch, keys: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the distances of own and of transformers' layers to the logprobs of a batch."""
    groups = len(batch.groups)
    found = {}
    for layers, chosen in ((OWN, nullcontext()), (TRANSFORMERS, _transformers_layers())):
        with chosen:
            learner = Learner(_run_config(folder, groups, groups, keys), ParallelContext(), 1)
            metrics = learner.train_step(batch, 1)
        found[layers] = {name: metrics[key] for name, key in METRICS.items()}
    return found


@contextmanager
def _transformers_layers() -> Iterator[None]:
    def keep(*_: object, **__: object) -> None:
        pass

    with patch.multiple(loading, use_native_layers=keep, use_native_experts=keep):
        yield


def measure(case: Case, python: str, updates: int, folder: Path) -> dict[str, Any]:
    """Return the distances of one model before and after training."""
    save_model(case, folder)
    vocabulary = case.shape["vocab_size"]
    training = (*case.keys, *case.training, f"actor_rollout_ref.actor.optim.lr={_LEARNING_RATE}")
    learner = Learner(
        _run_config(folder, GROUPS, GROUPS // 2, training), ParallelContext(), updates
    )
    found: dict[str, Any] = {}
    with closing(Engine(python, folder, case.keys)) as engine:

        def measure_now(when: str) -> None:
            save_file(engine.serve(learner), folder / "model.safetensors", {"format": "pt"})
            batch = engine.sample(vocabulary, MEASURED_GROUPS, MEASURED_TOKENS)
            found[when] = distances(folder, batch, case.keys) | _of_samples(batch)
            print_line(f"  {when}: {found[when]}")

        measure_now("before")
        for step in range(1, updates + 1):
            metrics = learner.train_step(engine.sample(vocabulary, GROUPS, NEW_TOKENS), step)
            engine.serve(learner)
            if step % 10 == 0:
                print_line(f"  update {step}: k3 {metrics[METRICS['k3']]:.2e}")
        measure_now("after")
    return found


def _of_samples(batch: TrainBatch) -> dict[str, float]:
    """Return entropy and reward of samples, to see that training moves the policy."""
    rollouts = [one for group in batch.groups for one in group.rollouts]
    logprobs = np.concatenate([one.behavior_logprobs for one in rollouts])
    shares = [scored.metrics["acc"] for group in batch.groups for scored in group.scores]
    return {"nats_per_token": -float(logprobs.mean()), "wanted_tokens": float(np.mean(shares))}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, object]:
    """Return the JSON object."""
    ratios = [
        times[when][OWN]["k3"] / times[when][TRANSFORMERS]["k3"]
        for times in found.values()
        for when in ("before", "after")
    ]
    drifts = [times["after"][OWN]["k3"] / times["before"][OWN]["k3"] for times in found.values()]
    return {
        "bf16_distance_ratio": round(max(ratios), 3),
        "bf16_drift_ratio": round(max(drifts), 3),
        "models": found,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    example = "python -m benchmarks.trainer.agreement --vllm-python .venv-vllm/bin/python"
    parser = tool_parser(__doc__, example)
    parser.add_argument("--vllm-python", required=True, help="of an environment with vLLM")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--updates", type=int, default=50)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for name in parsed.models:
        print_line(f"{name}:")
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(CASES[name], parsed.vllm_python, parsed.updates, Path(folder))
    return print_report(summary(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
