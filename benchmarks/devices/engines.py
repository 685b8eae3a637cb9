"""What it costs to read vLLM: Python CPU per token and tokens/s over vLLM alone, on the CPU.

A part of `make bench-devices` that needs an environment with vLLM. 128 samples of a tiny random
Qwen3 at a time, in groups of 8, with tokens of unfinished samples every 500 ms. vLLM alone is its
own client in the same process, which reports whole samples only. Both take turns.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.__main__ import VLLM, save_config
from benchmarks.engine.peer import PROMPT_TOKENS
from benchmarks.parts import Part
from benchmarks.peers import PeerProcess
from benchmarks.reporting import print_line

_GROUPS, _SAMPLES, _NEW_TOKENS = 16, 8, 256
_REPEATS = 7  # of each kind, after one that does not count
_BEFORE = 1.9
"""CPU of a token that was not vLLM's over vLLM's own, in the last commit that read token by token
(513f083d: 47.0 and 16.2 us)."""


def measure(vllm_python: str) -> dict[str, object]:
    """Return the figures; `vllm_python` is of an environment with vLLM."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(PeerProcess("benchmarks.devices.engine_peer", vllm_python)) as peer,
    ):
        save_config("tiny", Path(folder))
        peer.call(
            "start",
            engine=VLLM,
            folder=folder,
            dtype="bfloat16",
            slots=_GROUPS * _SAMPLES,
            tokens=-(-(PROMPT_TOKENS + _NEW_TOKENS) // 64) * 64,  # whole blocks of its cache
        )
        peer.call("serve_dummies")
        found: dict[str, list[dict[str, float]]] = {"groups": [], "alone": []}
        for _ in range(1 + _REPEATS):
            for op, runs in found.items():
                runs.append(_draw(peer, op))
    return _figures({"now": found["groups"][1:], "alone": found["alone"][1:]})


def _draw(peer: PeerProcess, op: str) -> dict[str, float]:
    found: dict[str, Any] = peer.call(op, groups=_GROUPS, samples=_SAMPLES, new_tokens=_NEW_TOKENS)
    if found["tokens"] != _GROUPS * _SAMPLES * _NEW_TOKENS:
        raise RuntimeError(f"{op}: {found['tokens']} tokens")
    return found


def _figures(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Return the figures of runs, by kind; what vLLM's client costs alone is not sluice's."""
    cpu_us = {
        kind: 1e6 * median(run["cpu_s"] / run["tokens"] for run in runs)
        for kind, runs in found.items()
    }
    rates = {kind: [run["tokens"] / run["seconds"] for run in runs] for kind, runs in found.items()}
    pairs = zip(rates["now"], rates["alone"], strict=True)
    report: dict[str, object] = {
        "vllm_python_ratio": round((cpu_us["now"] / cpu_us["alone"] - 1) / _BEFORE, 3),
        "vllm_overhead": round(median(now / alone for now, alone in pairs), 3),
        "vllm_cpu_us": {kind: round(value, 1) for kind, value in cpu_us.items()},
        "vllm_tokens_per_s": {kind: round(median(each)) for kind, each in rates.items()},
    }
    print_line(f"vLLM, CPU us a token in the replica's process: {report['vllm_cpu_us']}")
    print_line(f"vLLM, tokens/s at {_GROUPS * _SAMPLES} sequences: {report['vllm_tokens_per_s']}")
    return report


PART = Part(
    lambda parsed: measure(parsed.vllm_python),
    most={"vllm_python_ratio": 0.3},
    least={"vllm_overhead": 0.95},
    further=("vllm_cpu_us", "vllm_tokens_per_s"),
    needs="vllm_python",
)
