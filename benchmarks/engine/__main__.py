"""Measure generated tokens per second of each engine, in turns in one run; `make bench-engine`.

Every engine, and transformers `generate`, is a process of its own with one thread; all draw the
same number of samples of the same random Qwen3 from prompts of 20 tokens, with
logprobs. vLLM and SGLang take part where their environment's python is given. Printed last is one
JSON object:

torch_vs_vllm_128, torch_vs_hf_128  tokens/s of the torch engine over theirs, 128 sequences; the
                                    median of the ratios of neighbouring runs
startup_s         from the start of the process to the first token, weights sent in between
update_stall_ms   in which no token comes because of a swap, 64 sequences running
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
import torch
from transformers import Qwen3Config

from benchmarks.engine.peer import PROMPT_TOKENS, TRANSFORMERS
from benchmarks.peers import Fleet, PeerProcess
from benchmarks.reporting import ROOT, print_line, print_report
from tools.phases import tool_parser

TORCH, VLLM, SGLANG = "torch", "vllm", "sglang"
COUNTS = (1, 16, 64, 128)
# For packages that need CUDA.
_STAND_INS = {"PYTHONPATH": str(ROOT / "tests" / "engine_sglang" / "stand_ins")}
_BUSY, _BUCKET_MB = 64, 32
_LONG_S = 20.0


# Vocabulary, width, layers, heads, key and value heads, width of the MLP.
MODELS = {
    "tiny": (1024, 128, 4, 2, 1, 192),
    "10m": (16384, 256, 6, 4, 2, 896),
    "0.5b": (151936, 896, 24, 14, 2, 4864),  # for accelerators: Qwen2.5-0.5B's
}


def save_config(name: str, folder: Path) -> None:
    """Write ``config.json``, which is all that an engine needs of a model before weights."""
    vocabulary, width, layers, heads, kv_heads, mlp = MODELS[name]
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        head_dim=64,  # the smallest that every engine can run
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    ).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is generated, and where."""

    counts: tuple[int, ...]
    new_tokens: int
    repeats: int
    updates: int
    dtype: str
    device: str


class Peer:
    """A process that serves a model; this process is its trainer."""

    def __init__(self, engine: str, python: str, folder: Path, workload: Workload) -> None:
        self.engine, self._stack = engine, ExitStack()
        began_s = time.perf_counter()
        environment = _STAND_INS if engine == SGLANG else {}
        process = PeerProcess("benchmarks.engine.peer", python, environment)
        self._process = self._stack.enter_context(closing(process))
        self._fleet: Fleet | None = None
        try:
            self._start(folder, workload)
            self.draw(1, 1)
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began_s

    def _start(self, folder: Path, workload: Workload) -> None:
        layout = self._process.call(
            "start",
            engine=self.engine,
            folder=str(folder),
            dtype=workload.dtype,
            device=workload.device,
            slots=max(*workload.counts, _BUSY),
            # Rounded up to whole blocks of an engine's cache.
            tokens=-(-(PROMPT_TOKENS + workload.new_tokens) // 64) * 64,
        )["layout"]
        if layout is None:  # it has weights of its own
            return
        fleet = Fleet([self._process], layout, _BUCKET_MB)
        self._fleet = self._stack.enter_context(closing(fleet))
        fleet.form(fleet.replicas)
        fleet.update()

    def draw(self, sequences: int, new_tokens: int) -> float:
        """Return the tokens per second of one run."""
        found = self._process.call("draw", sequences=sequences, new_tokens=new_tokens)
        if found["tokens"] != sequences * new_tokens:
            raise RuntimeError(f"{self.engine}: {found['tokens']} tokens of {sequences} sequences")
        return float(found["tokens"] / found["seconds"])

    def stall_ms(self, workload: Workload) -> float | None:
        """Return the median stall of updates while it generates; None if it takes no updates."""
        if self._fleet is None:
            return None
        self._process.call("busy", sequences=_BUSY, new_tokens=workload.new_tokens)
        stalls = [self._fleet.update()[1] for _ in range(workload.updates)]
        self._process.call("quiet")
        return round(1000 * median(stalls), 1)

    def close(self) -> None:
        """End the process."""
        self._stack.close()


@dataclass(slots=True)
class Measured:
    """Figures of one model, by engine. `rates` are tokens/s of each run, by sequences at once."""

    startup_s: dict[str, float] = field(default_factory=dict)
    rates: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    stall_ms: dict[str, float] = field(default_factory=dict)

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


def measure(model: str, pythons: Mapping[str, str], workload: Workload) -> Measured:
    """Return all figures of one model."""
    found = Measured()
    with _peers(model, pythons, workload) as peers:
        found.startup_s = {peer.engine: round(peer.startup_s, 1) for peer in peers}
        print_line(f"  seconds to the first token: {found.startup_s}")
        for count in workload.counts:
            found.rates[count] = _in_turns(peers, count, workload)
            print_line(f"  {count} sequences, tokens/s: {found.tokens_per_s()[str(count)]}")
        for peer in peers:
            if (stall_ms := peer.stall_ms(workload)) is not None:
                found.stall_ms[peer.engine] = stall_ms
        print_line(f"  ms without a token for an update: {found.stall_ms}")
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


@contextmanager
def _peers(
    model: str, pythons: Mapping[str, str], workload: Workload
) -> Iterator[tuple[Peer, ...]]:
    """Start one peer after the other, so that none slows another's start."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_config(model, folder)
        yield tuple(
            stack.enter_context(closing(Peer(engine, python, folder, workload)))
            for engine, python in pythons.items()
        )


def summary(found: Mapping[str, Measured], workload: Workload) -> dict[str, object]:
    """Return the JSON object, each figure by model."""
    most = max(workload.counts)

    def ratios(other: str) -> dict[str, float | None]:
        return {name: each.ratio(TORCH, other, most) for name, each in found.items()}

    return {
        f"torch_vs_vllm_{most}": ratios(VLLM),
        f"torch_vs_hf_{most}": ratios(TRANSFORMERS),
        "tokens_per_s": {name: each.tokens_per_s() for name, each in found.items()},
        "startup_s": {name: each.startup_s for name, each in found.items()},
        "update_stall_ms": {name: each.stall_ms for name, each in found.items()},
        "settings": msgspec.to_builtins(workload),
    }


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m benchmarks.engine --vllm-python .venv-vllm/bin/python")
    parser.add_argument("--vllm-python", help="of an environment with vLLM and sluice")
    parser.add_argument("--sglang-python", help="of an environment with SGLang and sluice")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "10m"])
    parser.add_argument("--sequences", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="of each run, after a warm-up")
    parser.add_argument("--updates", type=int, default=7, help="whose stall is measured")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parsed = parser.parse_args(arguments)
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
    found: dict[str, Measured] = {}
    for name in parsed.models:
        print_line(f"{name}, {parsed.dtype}")
        found[name] = measure(name, pythons, workload)
    return print_report(summary(found, workload))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
