"""What it costs to read vLLM: Python CPU per token and tokens/s over vLLM alone, on the CPU.

``python -m benchmarks.devices.engines --vllm-python PYTHON``, or a part of `make bench-devices`.
128 samples of a tiny random Qwen3 at a time, in groups of 8, with tokens of unfinished samples
every 500 ms. vLLM alone is its own client in the same process, which reports whole samples only;
the earlier commit reads token by token. All take turns.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.__main__ import VLLM, save_config
from benchmarks.engine.peer import PROMPT_TOKENS
from benchmarks.peers import PeerProcess
from benchmarks.reporting import ROOT, print_line, print_report
from tools.phases import tool_parser

BEFORE = "513f083d"
"""The last commit that reads token by token."""
KEYS = ("vllm_python_ratio", "vllm_overhead", "vllm_cpu_us", "vllm_tokens_per_s")
MOST = {"vllm_python_ratio": 0.3}
LEAST = {"vllm_overhead": 0.95}

_PEER = Path(__file__).with_name("engine_peer.py")
_GROUPS, _SAMPLES, _NEW_TOKENS = 16, 8, 256
_TREES = ("sluice", "services", "tests", "benchmarks", "tools")
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def measure(vllm_python: str, before: str = BEFORE, repeats: int = 7) -> dict[str, object]:
    """Return the figures.

    Args:
        vllm_python: of an environment with vLLM.
        before: the commit that is compared with.
        repeats: of each kind, after one that does not count.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, old = Path(name) / "model", Path(name) / "tree"
        save_config("tiny", model)
        export(before, old, _TREES)
        (old / "benchmarks" / "devices").mkdir(exist_ok=True)
        shutil.copy(_PEER, old / "benchmarks" / "devices")
        peers = [
            stack.enter_context(closing(_start(vllm_python, tree, model))) for tree in (ROOT, old)
        ]
        kinds = {
            "now": (peers[0], "groups"),
            "alone": (peers[0], "alone"),
            "before": (peers[1], "groups"),
        }
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(1 + repeats):
            for kind, (peer, op) in kinds.items():
                found[kind].append(_draw(peer, op))
    return figures({kind: runs[1:] for kind, runs in found.items()})


def export(commit: str, folder: Path, wanted: Sequence[str]) -> None:
    """Write folders of a commit.

    Raises:
        SystemExit: there is no such commit here.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit, *wanted],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        raise SystemExit(f"--before {commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def figures(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
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
    environment = _ENVIRONMENT | {"PYTHONPATH": str(tree)}
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


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.devices.engines --vllm-python PYTHON")
    parser.add_argument("--vllm-python", required=True, help="of an environment with vLLM")
    parser.add_argument("--before", default=BEFORE, help="commit that is compared with")
    parser.add_argument("--repeats", type=int, default=7, help="of each kind, after a warm-up")
    parsed = parser.parse_args(arguments)
    return print_report(measure(parsed.vllm_python, parsed.before, parsed.repeats))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
