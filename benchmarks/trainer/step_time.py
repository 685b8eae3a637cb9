"""A learner's step of the quickstart's shape, now and at an earlier commit, in turns."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.reporting import ROOT, alternate, print_line
from benchmarks.trainer.step_peer import PROMPTS, RESPONSES
from tests.support.tiny_policy import save_model

BEFORE = "841ec66"
"""The commit before the trainer had its own layers."""

_PEER = Path(__file__).with_name("step_peer.py")
_WARM, _REPEATS = 2, 21
# Of `sluice.quickstart.model.make_config`.
_MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}


class StepPeer:
    """A learner in a process of a tree."""

    def __init__(self, tree: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PEER), str(model), json.dumps(_job())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
        )

    def step(self) -> float:
        """Return the seconds of a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def step_ratio(before: str) -> dict[str, Any]:
    """Return the median ratio of neighbouring steps, this tree's over the earlier commit's."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, old = Path(name) / "model", Path(name) / "tree"
        save_model(model, "qwen3", **_MODEL)
        export(before, old, ("sluice", "services", "tests"))
        peers = {"now": StepPeer(ROOT, model), "before": StepPeer(old, model)}
        for peer in peers.values():
            stack.callback(peer.close)
        kinds = {name: peer.step for name, peer in peers.items()}
        alternate(kinds, _WARM)
        seconds = alternate(kinds, _REPEATS)
    pairs = zip(seconds["now"], seconds["before"], strict=True)
    ratio = median(now / then for now, then in pairs)
    shown = {kind: round(median(found), 3) for kind, found in seconds.items()}
    print_line(f"seconds of a step of the quickstart's shape: {shown}, before is {before}")
    return {"quickstart_step_ratio": round(ratio, 3)}


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


def _job() -> dict[str, Any]:
    """Return the quickstart's configuration, for made-up tokens."""
    text = (files("sluice.quickstart") / "quickstart.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    tree["data"] |= {"max_prompt_length": PROMPTS[1], "max_response_length": RESPONSES[1]}
    tree["trainer"] |= {"device": "cpu"}
    return tree
