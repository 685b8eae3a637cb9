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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from services.rollout.engines.embedded.engine import TorchEngine, TorchEngineSettings
from services.rollout.engines.protocol import GenerationRequest
from sluice.types import SamplingParams

SEQUENCES, GROUP, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 33, 40
# Tokens per second of processor time, and per second on the clock.
Rate = tuple[float, float]


def _rate(run: Callable[[], None]) -> Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    tokens = SEQUENCES * NEW_TOKENS
    return tokens / (time.process_time() - cpu), tokens / (time.perf_counter() - wall)


def _model(directory: Path) -> Any:  # noqa: ANN401 - typed without generate
    """Return the model as transformers runs it by default, with weights from its configuration."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Without end tokens every sample has the same length on both sides.
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.eval()
    return model


def _generate(model: Any, prompts: np.ndarray) -> None:  # noqa: ANN401
    """Generate one batch by transformers."""
    inputs = torch.from_numpy(prompts.astype(np.int64))
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            num_return_sequences=GROUP,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
        )
    assert output.shape == (SEQUENCES, PROMPT_TOKENS + NEW_TOKENS)


async def _sample(engine: TorchEngine, prompts: np.ndarray) -> None:
    """Generate one batch by the engine, through the interface that the rollout service uses."""
    sampling = SamplingParams(1.0, 1.0, -1, NEW_TOKENS, 0, (), ignore_eos=True)

    async def one(name: str, prompt: np.ndarray) -> int:
        request = GenerationRequest(name, prompt, tuple(range(GROUP)), sampling)
        async with aclosing(engine.generate(request, every_token=False)) as stream:
            return sum([chunk.token_ids.size async for chunks in stream for chunk in chunks])

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(str(n), prompt)) for n, prompt in enumerate(prompts)]
    assert sum(task.result() for task in running) == SEQUENCES * NEW_TOKENS


def measure(directory: Path, repeats: int) -> dict[str, object]:
    """Return medians; the ratio is the median of those of neighbouring runs."""
    torch.set_num_threads(1)
    model = _model(directory)
    shape = (SEQUENCES // GROUP, PROMPT_TOKENS)
    vocabulary = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.uint32)
    engine = TorchEngine(
        TorchEngineSettings(
            model_path=str(directory),
            dtype="float32",
            slots=SEQUENCES,
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        )
    )
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            runner.run(engine.load_weights(model.state_dict(), 1, "benchmark"))
            pairs = [
                (
                    _rate(lambda: runner.run(_sample(engine, prompts))),
                    _rate(lambda: _generate(model, prompts)),
                )
                for _ in range(repeats + 1)
            ][1:]  # the first pair is a warm-up
        finally:
            runner.run(engine.stop())
    ratios = [ours[0] / theirs[0] for ours, theirs in pairs]
    return {
        "generate_ratio_hf": round(median(ratios), 2),
        "generate_ratio_hf_runs": [round(ratio, 2) for ratio in ratios],
        "engine_tokens_per_s": round(median(ours[0] for ours, _ in pairs)),
        "hf_tokens_per_s": round(median(theirs[0] for _, theirs in pairs)),
        "engine_tokens_per_s_wall": round(median(ours[1] for ours, _ in pairs)),
        "hf_tokens_per_s_wall": round(median(theirs[1] for _, theirs in pairs)),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs after a warm-up")
    parsed = parser.parse_args(arguments)
    sys.stdout.write(json.dumps(measure(parsed.model, parsed.repeats)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
