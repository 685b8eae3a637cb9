"""Measure on the CPU what will matter on devices; `make bench-devices`.

Parts, and the keys of the JSON object that is printed last; those of parts not chosen are null:

engines     vllm_python_ratio: sluice's Python CPU of a token from vLLM, relative to vLLM's own,
            over that of the last commit that read every token; vllm_overhead: tokens/s at 128
            sequences over vLLM alone; with --vllm-python only
overlap     overlap_speedup: trained samples/s with the transfer of a version beside the next step
            over awaited, by what the run waits for and its staleness; staleness_exceeded: samples
            beyond the bound; fleet_capacity_min: least share of eight replicas that sample while
            all swap, 1 s each
launches    launches_placed: published launches whose processes have the devices of their split, on
            Ray clusters with pretended devices; launch_splits: what each says; with --ray-python
            only
shares      bytes_share_ratio: bytes into a worker of a replica of four over a quarter of the model,
            the worst; host_share_ratio: its host memory for weights over its share, the most
            during three updates
wire        batch_bytes_ratio: bytes into a trainer rank over those of its samples and prompts, the
            worst of four; batch_s: seconds on loopback until all ranks have taken a batch of
            512 x 16 samples of 20,000 tokens
receipts    receipts_s: seconds until the prompts of such a batch are on disk; acknowledge_s:
            until its acknowledgement is; outline_mb: MiB of the batch without tokens;
            archived_share: of its groups that reach the archive of samples
recovery    recovery_s: p95 of the seconds from the kill of a replica, the reward service or the
            trainer until it works again, by name
fleet       fleet_samples_per_s: samples that the reward service's process grades, while 50,000
            grow on 512 replicas (--concurrent: fewer of both); fleet_lost: prompts, samples and
            tokens without a place afterwards; reward_memory_ratio: memory of the service, less
            300 MB, over the bytes of the tokens and texts that it holds

A part that fails ends no other: its keys, and those of one that is left out, say why. missed names
the keys that miss their bars, failed the parts with an error; the exit code is then 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.devices import (
    engines,
    fleet,
    launches,
    overlap,
    receipts,
    recovery,
    shares,
    wire,
)
from benchmarks.parts import Part, parts_parser, run_parts

PARTS: Mapping[str, Part] = {
    "overlap": overlap.PART,
    "wire": wire.PART,
    "receipts": receipts.PART,
    "shares": shares.PART,
    "launches": launches.PART,
    "engines": engines.PART,
    "fleet": fleet.PART,
    "recovery": recovery.PART,
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.devices --parts wire", PARTS)
    parser.add_argument("--ray-python", help="of an environment with Ray and sluice")
    parser.add_argument(
        "--concurrent", type=int, default=fleet.CONCURRENT, help="samples of the part fleet"
    )
    return run_parts(parser.parse_args(arguments), PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
