"""Measure evaluations, recipes, guards and sources on the CPU; `make bench-eval`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

equal    responses_differ: prompts with other greedy responses by `sluice eval --model` than by
         `sluice eval RUN` at the same weights; metrics_difference: of their metrics, the largest;
         first_sample_s: from the command's start to its first graded prompt, the median of three
resume   resume_differs: 0 if evaluations whose processes or command are killed on the way have the
         results of one that is left alone, else 1: tests/multiprocess/test_evaluation.py
lm_eval  lm_eval_difference: 0 if lm-eval's accuracy at `sluice serve-openai` is ours, on 100 rows,
         else 1: tests/harness; needs --harness-python, of the environment of `make test-harness`
guards   validations_until_rollback: of a run whose learning rate becomes a hundred times too high;
         rollback_points: of accuracy, the best less the first after the rollback, in percent
sources  share_error: of two sources at 3:1, the second ten times slower: the largest relative error
         of a share of the trained samples
recipes  recipes: of each tiny recipe its seconds, and its held-out accuracy before and after

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluation import collapse, equality, sources
from benchmarks.parts import Part, parts_parser, run_parts, tests_pass
from benchmarks.reporting import ROOT, last_json

_LM_EVAL = (
    "tests/harness/test_others_harnesses.py"
    "::test_lm_evals_accuracy_of_chats_is_that_of_our_own_scorer"
)


def _resumed() -> Mapping[str, Any]:
    return {"resume_differs": int(not tests_pass("tests/multiprocess/test_evaluation.py"))}


def _lm_eval(parsed: argparse.Namespace) -> Mapping[str, Any]:
    passes = tests_pass(_LM_EVAL, SLUICE_HARNESS_PYTHON=parsed.harness_python)
    return {"lm_eval_difference": int(not passes)}


def _recipes() -> Mapping[str, Any]:
    """Train every recipe in small; that command fails if one does not learn."""
    return {"recipes": last_json([sys.executable, "-m", "benchmarks.recipes"])}


PARTS: Mapping[str, Part] = {
    "equal": Part(lambda parsed: equality.measure(parsed.folder), equality.MOST),
    "resume": Part(lambda _: _resumed(), most={"resume_differs": 0.0}),
    "lm_eval": Part(_lm_eval, most={"lm_eval_difference": 0.0}, needs="harness_python"),
    "guards": Part(lambda parsed: collapse.measure(parsed.folder), collapse.MOST),
    "sources": Part(lambda parsed: sources.measure(parsed.folder), sources.MOST),
    "recipes": Part(lambda _: _recipes(), further=("recipes",)),
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.evaluation --parts equal,resume", PARTS)
    parser.add_argument("--harness-python", help="of an environment with lm-eval")
    parser.add_argument(
        "--folder",
        type=lambda text: Path(text).absolute(),
        default=ROOT / "runs" / "bench-eval",
        help="for all files; the quickstart's are made there once",
    )
    return run_parts(parser.parse_args(arguments), PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
