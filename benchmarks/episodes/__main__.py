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
from functools import partial

from benchmarks.episodes import jars, latency, single_turn, tokens
from benchmarks.episodes.reuse import reuse_figures
from benchmarks.episodes.sandbox import sandbox_figures
from benchmarks.parts import Part, missed, parts_parser, run_parts

KEYS = (
    *jars.KEYS,
    *tokens.KEYS,
    *latency.KEYS,
    *single_turn.KEYS,
    *("prefix_hit", "load_spread", "reuse_speedup"),
    *("sandbox_contained", "reclaim_s"),
)
MOST: Mapping[str, float] = {
    **jars.MOST,
    **tokens.MOST,
    **latency.MOST,
    "load_spread": 1.3,
    "reclaim_s": 2.0,
}
LEAST: Mapping[str, float] = {
    **jars.LEAST,
    **single_turn.LEAST,
    "prefix_hit": 0.9,
    "reuse_speedup": 1.5,
    "sandbox_contained": 40.0,
}
PARTS: Mapping[str, Part] = {
    "jars": lambda _: jars.measure(),
    "tokens": lambda parsed: tokens.measure(parsed.episodes),
    "latency": lambda _: latency.measure(),
    "single_turn": lambda _: single_turn.measure(),
    "reuse": lambda _: reuse_figures(),
    "sandbox": lambda _: sandbox_figures(),
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.episodes --parts tokens", PARTS)
    parser.add_argument(
        "--episodes", type=int, default=tokens.EPISODES, help="of the part tokens, at least 400"
    )
    parsed = parser.parse_args(arguments)
    return run_parts(parsed, PARTS, KEYS, partial(missed, most=MOST, least=LEAST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
