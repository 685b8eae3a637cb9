"""`make bench-sync`: what bringing new weights to the replicas costs.

Real processes with the torch engine receive a random Llama. Printed last is one JSON object:

bytes_ratio     bytes of an update sent as its changes over bytes of all weights, by learning rate
stall_ratio     seconds in which a generating replica draws no token for a swap, over seconds of a
                transfer of all weights
dense_vs_gloo   seconds of a transfer of all weights over those of one bare broadcast of
                torch.distributed, same bytes and processes
digest_overhead share of a transfer of all weights that goes into proving it
join_s          from a replica with an empty engine to one that serves, its process being up
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.engine.peer import PROMPT_TOKENS, NoDigest
from benchmarks.peers import Fleet, PeerProcess
from benchmarks.reporting import alternate, print_line, print_report
from benchmarks.sync.bytes_ratio import bytes_ratios
from sluice.config.schema.service import WeightsConfig
from sluice.weights import transfer
from tools.commands import free_port
from tools.phases import tool_parser

RATES = (3e-7, 1e-6, 3e-6, 1e-5)
_SAMPLES, _CONTEXT = 32, 1024


class Bare:
    """A default process group of torch.distributed with all replicas, and a broadcast in it."""

    def __init__(self, fleet: Fleet) -> None:
        self._replicas = fleet.replicas
        port = free_port()
        size, num_bytes = len(self._replicas) + 1, fleet.weights.plan.total_bytes
        for rank, replica in enumerate(self._replicas, start=1):
            replica.send("meet", port=port, rank=rank, size=size, num_bytes=num_bytes)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=size)
        for replica in self._replicas:
            replica.answer()
        # Written to: memory that never was is one page of zeros, which stays in the cache.
        self._bytes = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    def broadcast(self) -> float:
        """Return the seconds until all replicas have the same bytes from a bare broadcast."""
        began_s = time.perf_counter()
        for replica in self._replicas:
            replica.send("bare")
        dist.broadcast(self._bytes, 0)
        for replica in self._replicas:
            replica.answer()
        return time.perf_counter() - began_s


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.sync --replicas 1 --repeats 5")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25, help="of every timed transfer")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ratios = bytes_ratios(RATES)
    print_line(f"bytes of an update over all bytes: {ratios}")
    with _fleet(parsed.replicas) as fleet:
        print_line(f"{fleet.weights.plan.total_bytes / 1e6:.0f} MB to {parsed.replicas} replicas")
        figures = measure(fleet, parsed.repeats)
    return print_report({"bytes_ratio": ratios, **figures})


def measure(fleet: Fleet, repeats: int) -> dict[str, float]:
    """Return all figures that need replicas."""
    joins = [_join(fleet) for _ in range(3)]
    bare = Bare(fleet)
    fleet.form(fleet.replicas)
    for _ in range(3):  # until both ends have all of their memory
        fleet.update()
    kinds: dict[str, Callable[[], float]] = {
        "dense": lambda: fleet.update()[0],
        "bare": bare.broadcast,
        "no digest": lambda: _without_digest(fleet),
    }
    seconds = alternate(kinds, repeats)
    stalls = _stalls(fleet, repeats)
    print_line(f"seconds: {seconds}, stalls {stalls}, joins {joins}")
    dense = median(seconds["dense"])
    return {
        "stall_ratio": median(stalls) / dense,
        "dense_vs_gloo": dense / median(seconds["bare"]),
        "digest_overhead": 1 - median(seconds["no digest"]) / dense,
        "join_s": median(joins),
    }


def _without_digest(fleet: Fleet) -> float:
    with patch.object(transfer, "StreamDigest", NoDigest):
        return fleet.update(digest=False)[0]


def _stalls(fleet: Fleet, repeats: int) -> list[float]:
    """Return the stalls of swaps while every replica generates."""
    for replica in fleet.replicas:
        replica.call("busy", sequences=_SAMPLES, new_tokens=_CONTEXT - PROMPT_TOKENS)
    stalls = [fleet.update()[1] for _ in range(repeats)]
    for replica in fleet.replicas:
        replica.call("quiet")
    return stalls


def _join(fleet: Fleet) -> float:
    began_s = time.perf_counter()
    fleet.form(fleet.replicas[:1])
    fleet.update()
    return time.perf_counter() - began_s


@contextmanager
def _fleet(replicas: int) -> Iterator[Fleet]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=16,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
        ).save_pretrained(folder)
        peers = [
            stack.enter_context(closing(PeerProcess("benchmarks.engine.peer")))
            for _ in range(replicas)
        ]
        model = {"engine": "torch", "folder": str(folder), "dtype": "bfloat16"}
        for peer in peers:
            peer.send("start", **model, slots=_SAMPLES, tokens=_CONTEXT)
        layouts = [peer.answer()["layout"] for peer in peers]
        layout = [spec | {"dtype": "bfloat16"} for spec in layouts[0]]
        yield stack.enter_context(closing(Fleet(peers, layout, WeightsConfig().bucket_mb)))
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
