"""Measure generated tokens per second: the embedded engine against transformers `generate`.

Both generate the same number of samples with the same model, prompts, lengths and temperature, each
with one torch thread, in alternating runs of one process: `python -m benchmarks.quickstart.generate
--model FOLDER`.

The last line printed is one JSON object. Rates are per second of processor time (of all threads of
the process, so that other programs on the machine count less); `_wall` are per second on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from services.rollout.engines.embedded.engine import TorchEngine, TorchEngineSettings
from services.rollout.engines.protocol import GenerationRequest
from sluice.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What one run generates."""

    sequences: int
    group: int
    prompt_tokens: int
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        """Generated tokens of one run."""
        return self.sequences * self.new_tokens

    def prompts(self, vocab_size: int) -> np.ndarray:
        """Return [groups, prompt tokens] uint32."""
        shape = (self.sequences // self.group, self.prompt_tokens)
        return np.random.default_rng(_SEED).integers(0, vocab_size, shape).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one run."""

    per_cpu_second: float
    per_second: float


def _rate(tokens: int, run: Callable[[], None]) -> Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Rate(
        tokens / (time.process_time() - cpu),
        tokens / (time.perf_counter() - wall),
    )


def _model(directory: Path, dtype: str) -> PreTrainedModel:
    """Return the model as transformers runs it by default, with weights from its configuration."""
    torch.manual_seed(_SEED)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=getattr(torch, dtype)
    )
    # Without end tokens every sample has the same length on both sides.
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.eval()
    return cast("PreTrainedModel", model)


class Transformers:
    """Runs of `model.generate`."""

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        prompts = torch.from_numpy(workload.prompts(model.config.vocab_size).astype(np.int64))
        self._arguments: dict[str, Any] = {
            "input_ids": prompts,
            "attention_mask": torch.ones_like(prompts),
            "num_return_sequences": workload.group,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "max_new_tokens": workload.new_tokens,
        }
        self._model: Any = model
        self._expected = (workload.sequences, workload.new_tokens)

    def run(self) -> None:
        """Generate one batch."""
        with torch.inference_mode():
            output = self._model.generate(**self._arguments)
        generated = output[:, self._arguments["input_ids"].shape[1] :]
        assert tuple(generated.shape) == self._expected


class Embedded:
    """Runs of the engine, through the interface that the rollout service uses."""

    def __init__(self, engine: TorchEngine, workload: Workload, runner: asyncio.Runner) -> None:
        sampling = SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_tokens=workload.new_tokens,
            seed=_SEED,
            ignore_eos=True,
        )
        indexes = tuple(range(workload.group))
        self._requests = [
            GenerationRequest(str(number), prompt, indexes, sampling)
            for number, prompt in enumerate(workload.prompts(engine.vocab_size))
        ]
        self._engine, self._runner = engine, runner
        self._expected = workload.total_tokens

    def run(self) -> None:
        """Generate one batch."""
        assert self._runner.run(self._all()) == self._expected

    async def _all(self) -> int:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(request)) for request in self._requests]
        return sum(task.result() for task in running)

    async def _one(self, request: GenerationRequest) -> int:
        async with aclosing(self._engine.generate(request, every_token=False)) as stream:
            return sum([chunk.token_ids.size async for chunks in stream for chunk in chunks])


def _summary(ours: Sequence[Rate], theirs: Sequence[Rate]) -> dict[str, Any]:
    """Return medians; the ratio is the median of those of neighbouring runs."""
    ratios = [a.per_cpu_second / b.per_cpu_second for a, b in zip(ours, theirs, strict=True)]
    return {
        "generate_ratio_hf": round(statistics.median(ratios), 2),
        "generate_ratio_hf_runs": [round(ratio, 2) for ratio in ratios],
        "engine_tokens_per_s": round(statistics.median(r.per_cpu_second for r in ours)),
        "hf_tokens_per_s": round(statistics.median(r.per_cpu_second for r in theirs)),
        "engine_tokens_per_s_wall": round(statistics.median(r.per_second for r in ours)),
        "hf_tokens_per_s_wall": round(statistics.median(r.per_second for r in theirs)),
    }


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="samples of one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs after a warm-up")
    parser.add_argument("--batch-invariant", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.sequences < 1 or parsed.sequences % parsed.group:
        parser.error(f"--sequences {parsed.sequences} is not a multiple of --group {parsed.group}")
    return parsed


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark and return what it prints."""
    parsed = _arguments(arguments)
    torch.set_num_threads(1)
    workload = Workload(parsed.sequences, parsed.group, parsed.prompt_tokens, parsed.new_tokens)
    with asyncio.Runner() as runner:
        model = _model(parsed.model, parsed.dtype)
        engine = TorchEngine(
            TorchEngineSettings(
                model_path=str(parsed.model),
                dtype=parsed.dtype,
                slots=workload.sequences,
                max_model_len=workload.prompt_tokens + workload.new_tokens,
                batch_invariant=parsed.batch_invariant,
            )
        )
        runner.run(engine.start())
        try:
            runner.run(engine.load_weights(model.state_dict(), 1, "benchmark"))
            sides = (Embedded(engine, workload, runner), Transformers(model, workload))
            rates = [
                [_rate(workload.total_tokens, side.run) for side in sides]
                for _ in range(parsed.repeats + 1)
            ][1:]
        finally:
            runner.run(engine.stop())
    settings = {key: str(value) for key, value in vars(parsed).items()}
    return _summary([pair[0] for pair in rates], [pair[1] for pair in rates]) | settings


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
