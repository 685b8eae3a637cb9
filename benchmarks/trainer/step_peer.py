"""Steps of a learner of the quickstart's shape, in this tree or an earlier one of the same API.

Run with the tree as working directory. Its arguments are the model's folder and the quickstart's
configuration as JSON; each line of standard input asks for a step, and the answer are the CPU
seconds of its one thread.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

GROUPS, SAMPLES = 64, 8
PROMPTS, RESPONSES = (20, 40), (20, 50)
"""Tokens of a prompt and of a response, at least and less than."""


def _module(*names: str) -> Any:  # noqa: ANN401 - of an unknown tree
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"none of {', '.join(names)} is in this tree")


def make_batch(seed: int, vocabulary: int) -> Any:  # noqa: ANN401
    """Return a train batch of the tree's type."""
    types, tiny = _module("sluice.types"), _module("tests.support.tiny_policy")
    random = np.random.default_rng(seed)
    groups = []
    for number in range(GROUPS):
        lengths = tuple(random.integers(*RESPONSES, size=SAMPLES).tolist())
        prompt = random.integers(vocabulary, size=random.integers(*PROMPTS)).astype(np.uint32)
        group = tiny.make_group(1000 * seed + number, lengths)
        groups.append(replace(group, prompt_token_ids=prompt))
    return types.TrainBatch(f"batch-{seed}", seed, tuple(groups), types.DataProgress(GROUPS), {})


def main() -> int:
    """Answer until standard input ends."""
    sys.path[0] = ""  # the tree, not the folder of this file
    torch.set_num_threads(1)
    folder, tree = sys.argv[1], json.loads(sys.argv[2])
    tree["actor_rollout_ref"]["model"] = {"path": folder}
    config = msgspec.convert(tree, _module("sluice.config.run").RunConfig)
    learner_module = _module("services.trainer.learner.learner", "services.trainer.learner.worker")
    ranks = _module("services.trainer.learner.ranks", "services.trainer.learner.parallel")
    alone = getattr(ranks, "SingleProcess", None) or ranks.DataParallel
    learner = learner_module.Learner(config, alone(), 1000)
    for number, _ in enumerate(sys.stdin, start=1):
        batch = make_batch(number, 50)
        began_s = time.process_time()
        learner.train_step(batch, number)
        sys.stdout.write(json.dumps(time.process_time() - began_s) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
