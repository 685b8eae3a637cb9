"""What it costs to read vLLM: Python CPU per token and tokens/s over vLLM alone, on the CPU.

A part of `make bench-devices` that needs an environment with vLLM. 128 samples of a tiny random
Qwen3 at a time, in groups of 8, with tokens of unfinished samples every 500 ms. vLLM alone is its
own client in the same process, which reports whole samples only; the earlier commit reads token by
token. All take turns.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.__main__ import VLLM, save_config
from benchmarks.engine.peer import PROMPT_TOKENS
from benchmarks.parts import Part
from benchmarks.peers import PeerProcess
from benchmarks.reporting import ROOT, print_line

BEFORE = "513f083d"
"""The last commit that reads token by token."""

_PEER = Path(__file__).with_name("engine_peer.py")
_GROUPS, _SAMPLES, _NEW_TOKENS = 16, 8, 256
_REPEATS = 7  # of each kind, after one that does not count
_TREES = ("sluice", "services", "tests", "benchmarks", "tools")


def measure(vllm_python: str) -> dict[str, object]:
    """Return the figures; `vllm_python` is of an environment with vLLM."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, old = Path(name) / "model", Path(name) / "tree"
        save_config("tiny", model)
        _export(old)
        peers = [
            stack.enter_context(closing(_start(vllm_python, tree, model))) for tree in (ROOT, old)
        ]
        kinds = {
            "now": (peers[0], "groups"),
            "alone": (peers[0], "alone"),
            "before": (peers[1], "groups"),
        }
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(1 + _REPEATS):
            for kind, (peer, op) in kinds.items():
                found[kind].append(_draw(peer, op))
    return _figures({kind: runs[1:] for kind, runs in found.items()})


def _export(folder: Path) -> None:
    """Write the earlier commit, with this tree's peer.

    Raises:
        SystemExit: there is no such commit here.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", BEFORE, *_TREES],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        raise SystemExit(f"commit {BEFORE}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    (folder / "benchmarks" / "devices").mkdir(exist_ok=True)
    shutil.copy(_PEER, folder / "benchmarks" / "devices")


def _figures(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Return the figures of runs, by kind; what vLLM's client costs alone is not sluice's."""
    cpu_us = {
        kind: 1e6 * median(run["cpu_s"] / run["tokens"] for run in runs)
        for kind, runs in found.items()
    }
    rates = {kind: [run["tokens"] / run["seconds"] for run in runs] for kind, runs in found.items()}
    ours, theirs = cpu_us["now"] - cpu_us["alone"], cpu_us["before"] - cpu_us["alone"]
    pairs = zip(rates["now"], rates["alone"], strict=True)
    report: dict[str, object] = {
        "vllm_python_ratio": round(ours / theirs, 3),
        "vllm_overhead": round(median(now / alone for now, alone in pairs), 3),
        "vllm_cpu_us": {kind: round(value, 1) for kind, value in cpu_us.items()},
        "vllm_tokens_per_s": {kind: round(median(each)) for kind, each in rates.items()},
    }
    print_line(f"vLLM, CPU us a token in the replica's process: {report['vllm_cpu_us']}")
    print_line(f"vLLM, tokens/s at {_GROUPS * _SAMPLES} sequences: {report['vllm_tokens_per_s']}")
    return report


def _start(python: str, tree: Path, model: Path) -> PeerProcess:
    environment = {"PYTHONPATH": str(tree)}
    peer = PeerProcess("benchmarks.devices.engine_peer", python, environment, tree)
    try:
        peer.call(
            "start",
            engine=VLLM,
            folder=str(model),
            dtype="bfloat16",
            slots=_GROUPS * _SAMPLES,
            tokens=-(-(PROMPT_TOKENS + _NEW_TOKENS) // 64) * 64,  # whole blocks of its cache
        )
        peer.call("serve_dummies")
    except BaseException:
        peer.close()
        raise
    return peer


def _draw(peer: PeerProcess, op: str) -> dict[str, float]:
    found: dict[str, Any] = peer.call(op, groups=_GROUPS, samples=_SAMPLES, new_tokens=_NEW_TOKENS)
    if found["tokens"] != _GROUPS * _SAMPLES * _NEW_TOKENS:
        raise RuntimeError(f"{op}: {found['tokens']} tokens")
    return found


PART = Part(
    lambda parsed: measure(parsed.vllm_python),
    most={"vllm_python_ratio": 0.3},
    least={"vllm_overhead": 0.95},
    further=("vllm_cpu_us", "vllm_tokens_per_s"),
    needs="vllm_python",
)
