"""Measure generated tokens per second of each engine, in turns in one run; `make bench-engine`.

Every engine, and transformers `generate`, is a process of its own with one thread; all draw the
same number of samples of the same random Qwen3 (`shapes`) from prompts of 20 tokens, with
logprobs. vLLM and SGLang take part where their environment's python is given. Printed last is one
JSON object:

torch_vs_vllm_128, torch_vs_hf_128  tokens/s of the torch engine over theirs, 128 sequences; the
                                    median of the ratios of neighbouring runs
startup_s         from the start of the process to the first token, weights sent in between
update_stall_ms   in which no token comes because of a swap, 64 sequences running
contract          cases of the engine contract, passed/total, as docs/engines.md records them
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks.engine.contract_record import contract_record
from benchmarks.engine.peer import PROMPT_TOKENS, TRANSFORMERS
from benchmarks.engine.shapes import SHAPES, Shape, bandwidth_share
from benchmarks.reporting import ROOT, print_line
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.sender import WeightSender

TORCH, VLLM, SGLANG = "torch", "vllm", "sglang"
ENGINES = (TORCH, VLLM, SGLANG)
COUNTS = (1, 16, 64, 128)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
_NEVER = threading.Event()
_TIMEOUT_S = 120.0
_BUSY = 64
_LONG_S = 20.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is generated, and where."""

    counts: tuple[int, ...]
    new_tokens: int
    repeats: int
    updates: int
    dtype: str
    device: str

    @property
    def slots(self) -> int:
        """How many sequences run at once."""
        return max(*self.counts, _BUSY)

    @property
    def context(self) -> int:
        """Tokens of a sample, rounded up to whole blocks of an engine's cache."""
        return -(-(PROMPT_TOKENS + self.new_tokens) // 64) * 64


def _environment(engine: str, device: str) -> dict[str, str]:
    """Return a peer's environment; on the CPU, SGLang has stand-ins for packages that need CUDA."""
    environment = _ENVIRONMENT | os.environ
    if engine == SGLANG and device == "cpu":
        environment["PYTHONPATH"] = str(ROOT / "tests" / "engine_sglang" / "stand_ins")
    return environment


class Peer:
    """A process of `engine.peer` that serves a model; this process is its trainer."""

    def __init__(self, engine: str, python: str, folder: Path, workload: Workload) -> None:
        self.engine = engine
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.engine.peer"],
            cwd=ROOT,
            env=_environment(engine, workload.device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._sender: WeightSender | None = None
        self._version = 0
        try:
            self._start(folder, workload)
            self.draw(1, 1)
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began_s

    def _start(self, folder: Path, workload: Workload) -> None:
        layout = self._call(
            "start",
            engine=self.engine,
            folder=str(folder),
            dtype=workload.dtype,
            device=workload.device,
            slots=workload.slots,
            tokens=workload.context,
        )["layout"]
        if layout is None:
            return
        specs = tuple(msgspec.convert(spec, TensorSpec) for spec in layout)
        self._weights = WeightBuffer(plan_transfer(specs, 4096))
        for tensor in self._weights.tensors.values():
            tensor.normal_(std=0.05)
        self._sender = WeightSender(device=CpuDevice(), bucket_bytes=32 << 20, timeout_s=_TIMEOUT_S)
        spec = self._sender.form_group(1, ["engine"], specs)["engine"]
        self._send("join", spec=msgspec.to_builtins(spec))
        self._sender.join(_NEVER)
        self._answer()
        self.update()

    @property
    def takes_updates(self) -> bool:
        """Whether weights can be sent to it."""
        return self._sender is not None

    def update(self) -> float:
        """Send all weights as the next version; return the seconds without a token for it."""
        assert self._sender is not None
        self._version += 1
        self._send("stage", epoch=1, version=self._version)
        report = self._sender.broadcast(self._weights, self._version, _NEVER)
        assert self._answer()["digest"] == report.digest
        done = self._call("commit", epoch=1, version=self._version, digest=report.digest)
        return float(done["stall_s"])

    def draw(self, sequences: int, new_tokens: int) -> float:
        """Return the tokens per second of one run."""
        found = self._call("draw", sequences=sequences, new_tokens=new_tokens)
        if found["tokens"] != sequences * new_tokens:
            raise RuntimeError(f"{self.engine}: {found['tokens']} tokens of {sequences} sequences")
        return float(found["tokens"] / found["seconds"])

    def stalls(self, workload: Workload) -> list[float]:
        """Return the seconds of each stall when updates come while it generates."""
        self._call("busy", sequences=_BUSY, new_tokens=workload.new_tokens)
        ends_s = time.monotonic() + _TIMEOUT_S
        while self._call("load")["slots_busy"] < _BUSY:
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{self.engine}: {_BUSY} sequences do not run at once")
            time.sleep(0.01)
        stalls = [self.update() for _ in range(workload.updates)]
        self._call("quiet")
        return stalls

    def bytes_per_s(self) -> float:
        """Return what its device's memory gives."""
        return float(self._call("bandwidth")["bytes_per_s"])

    def close(self) -> None:
        """End the process; kill it if it does not end."""
        if self._sender is not None:
            self._sender.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, op: str, **arguments: object) -> dict[str, Any]:
        self._send(op, **arguments)
        return self._answer()

    def _send(self, op: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.engine}: its process ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(slots=True)
class Measured:
    """Figures of one model, by engine. `rates` are tokens/s of each run, by sequences at once."""

    startup_s: dict[str, float] = field(default_factory=dict)
    rates: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    stall_ms: dict[str, float] = field(default_factory=dict)
    bandwidth: dict[str, float] = field(default_factory=dict)

    def ratio(self, engine: str, other: str, sequences: int) -> float | None:
        """Return the median of the ratios of neighbouring runs; none without runs of both."""
        found = self.rates.get(sequences, {})
        if engine not in found or other not in found:
            return None
        pairs = zip(found[engine], found[other], strict=False)  # one run of a slow engine
        return round(median(ours / theirs for ours, theirs in pairs), 2)

    def tokens_per_s(self) -> dict[str, dict[str, int]]:
        """Return medians, by sequences and engine."""
        return {
            str(count): {engine: round(median(rates)) for engine, rates in found.items()}
            for count, found in self.rates.items()
        }


def measure(shape: Shape, pythons: Mapping[str, str], workload: Workload) -> Measured:
    """Return all figures of one model."""
    found = Measured()
    with _peers(shape, pythons, workload) as peers:
        found.startup_s = {peer.engine: round(peer.startup_s, 1) for peer in peers}
        print_line(f"  seconds to the first token: {found.startup_s}")
        for count in workload.counts:
            found.rates[count] = _in_turns(peers, count, workload)
            print_line(f"  {count} sequences, tokens/s: {found.tokens_per_s()[str(count)]}")
        for peer in peers:
            if peer.takes_updates:
                found.stall_ms[peer.engine] = round(1000 * median(peer.stalls(workload)), 1)
        print_line(f"  ms without a token for an update: {found.stall_ms}")
        if workload.device != "cpu":
            found.bandwidth = _shares(found, shape, workload, peers[0].bytes_per_s())
            print_line(f"  share of the memory's speed: {found.bandwidth}")
    return found


def _in_turns(peers: Sequence[Peer], count: int, workload: Workload) -> dict[str, list[float]]:
    """Return tokens/s of each run by engine; take turns, so that other load meets all of them.

    The first run is a warm-up and does not count, unless it took very long: then it is alone.
    """
    long_rate = count * workload.new_tokens / _LONG_S
    warm = {peer.engine: peer.draw(count, workload.new_tokens) for peer in peers}
    rates: dict[str, list[float]] = {
        engine: [rate] if rate < long_rate else [] for engine, rate in warm.items()
    }
    quick = [peer for peer in peers if not rates[peer.engine]]
    for _ in range(workload.repeats):
        for peer in quick:
            rates[peer.engine].append(peer.draw(count, workload.new_tokens))
    return rates


def _shares(
    found: Measured, shape: Shape, workload: Workload, bytes_per_s: float
) -> dict[str, float]:
    count = max(workload.counts)
    context = PROMPT_TOKENS + workload.new_tokens / 2
    return {
        engine: round(
            bandwidth_share(shape, workload.dtype, count, context, median(rates), bytes_per_s), 4
        )
        for engine, rates in found.rates[count].items()
    }


@contextmanager
def _peers(
    shape: Shape, pythons: Mapping[str, str], workload: Workload
) -> Iterator[tuple[Peer, ...]]:
    """Start one peer after the other, so that none slows another's start."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape.save_config(folder)
        yield tuple(
            stack.enter_context(closing(Peer(engine, python, folder, workload)))
            for engine, python in pythons.items()
        )


def summary(
    found: Mapping[str, Measured], contract: Mapping[str, str], workload: Workload
) -> dict[str, object]:
    """Return the JSON object; the seconds and stalls are those of the last model."""
    last, most = list(found.values())[-1], max(workload.counts)

    def ratios(other: str) -> dict[str, float | None]:
        return {name: each.ratio(TORCH, other, most) for name, each in found.items()}

    result: dict[str, object] = {
        f"torch_vs_vllm_{most}": ratios(VLLM),
        f"torch_vs_hf_{most}": ratios(TRANSFORMERS),
        "startup_s": last.startup_s,
        "update_stall_ms": last.stall_ms,
        "contract": dict(contract),
        "tokens_per_s": {name: each.tokens_per_s() for name, each in found.items()},
        "startup_s_by_model": {name: each.startup_s for name, each in found.items()},
        "update_stall_ms_by_model": {name: each.stall_ms for name, each in found.items()},
        "settings": msgspec.to_builtins(workload),
    }
    shares = {name: each.bandwidth for name, each in found.items() if each.bandwidth}
    return result | ({"bandwidth_share": shares} if shares else {})


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        epilog="example: python -m benchmarks.engine --vllm-python .venv-vllm/bin/python",
    )
    parser.add_argument("--vllm-python", help="of an environment with vLLM and sluice")
    parser.add_argument("--sglang-python", help="of an environment with SGLang and sluice")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["tiny", "10m"])
    parser.add_argument("--sequences", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="of each run, after a warm-up")
    parser.add_argument("--updates", type=int, default=7, help="whose stall is measured")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="see that it runs: one short repeat")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.repeats, parsed.updates, parsed.new_tokens = 1, 1, 16
    if min(parsed.repeats, parsed.updates, parsed.new_tokens, *parsed.sequences) < 1:
        parser.error("counts are at least 1")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parsed = _arguments(arguments)
    torch.set_num_threads(1)
    given = {VLLM: parsed.vllm_python, SGLANG: parsed.sglang_python}
    pythons = {TORCH: sys.executable}
    pythons |= {engine: python for engine, python in given.items() if python}
    pythons |= {TRANSFORMERS: sys.executable}
    workload = Workload(
        tuple(parsed.sequences),
        parsed.new_tokens,
        parsed.repeats,
        parsed.updates,
        parsed.dtype,
        parsed.device,
    )
    contract = contract_record((ROOT / "docs" / "engines.md").read_text("utf-8"), ENGINES)
    found: dict[str, Measured] = {}
    for name in parsed.models:
        print_line(f"{name}: {SHAPES[name].num_parameters / 1e6:.2f} M parameters, {parsed.dtype}")
        found[name] = measure(SHAPES[name], pythons, workload)
    print_line(json.dumps(summary(found, contract, workload)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
