"""Measure episodes on the CPU; `make bench-episodes`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

jars         the jar game from nothing, by seed: accuracy_before, accuracy_after: held-out;
             accuracy_blind: of the trained policy that reads other jars than it asks for; seconds:
             of the whole command
tokens       of 10,000 episodes through the loop (--episodes: fewer): token_mismatches: turns and
             trained paths that are not what the engine read and sampled; loss_count_errors: sampled
             tokens that are in the loss other than once, and labels that were not sampled;
             logprob_error: trainer against embedded engine over turns, float32, the largest
latency      of about 2,000 episodes at once: idle_points: percent of the replicas' slots that idle
             with tools of a second, less those with tools of no time; reward_rss_mb: of the reward
             service, the most
single_turn  the quickstart's job as episodes of one answer: single_turn_equal: 1 where the weights
             after 3 steps are those without an environment, bit by bit; single_turn_ratio: of
             their tokens/s, the median of rounds in turns
reuse        prefix_hit: of the tokens that turns had before, those not computed again, on four
             replicas; load_spread: the most over the mean of their running turns; reuse_speedup:
             time of an episode of eight turns without reuse, over that with it
sandbox      sandbox_contained: of forty hostile programs; reclaim_s: seconds from the limit of a
             program until nothing is left of it, the longest

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.episodes import jars, latency, reuse, sandbox, single_turn, tokens
from benchmarks.parts import Part, parts_parser, run_parts

PARTS: Mapping[str, Part] = {
    "jars": jars.PART,
    "tokens": tokens.PART,
    "latency": latency.PART,
    "single_turn": single_turn.PART,
    "reuse": reuse.PART,
    "sandbox": sandbox.PART,
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.episodes --parts tokens", PARTS)
    parser.add_argument(
        "--episodes", type=int, default=tokens.EPISODES, help="of the part tokens, at least 400"
    )
    return run_parts(parser.parse_args(arguments), PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
