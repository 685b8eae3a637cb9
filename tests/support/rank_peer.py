"""One trainer rank: rank 0 obeys lines of standard input, the others follow it.

All ranks wait for a line ``go`` once they are ready, so that none runs into a short deadline while
another one still loads. Rank 0's further lines are ``train STEP`` (answers with the metrics),
``weights FILE``, ``save FOLDER``, ``load FOLDER``; the end of input stops all ranks. Every answer
is one line of JSON; an error ends the process with its text as the last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.learner.parallel import DataParallel, SingleProcess, TorchDistributed
from services.trainer.learner.rank_command import RankLeader, follow
from services.trainer.learner.worker import Learner
from sluice.device.select import select_device
from sluice.errors import SluiceError
from tests.support.tiny_policy import make_batch, make_config

NUM_GROUPS = 4


def answer(values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def obey(leader: RankLeader, learner: Learner) -> None:
    for line in sys.stdin:
        command, argument = line.split()
        result: object = "done"
        if command == "train":
            step = int(argument)
            result = leader.train_step(make_batch(NUM_GROUPS, seed=step), step)
        elif command == "weights":
            save_file({n: w.clone() for n, w in learner.named_weights()}, argument)
        elif command == "save":
            learner.save(Path(argument))
        elif command == "load":
            leader.load(Path(argument))
        answer(result)
    leader.stop()


def run(model: Path, timeout_s: float, forming_timeout_s: float, actor: dict[str, object]) -> None:
    parallel: DataParallel = SingleProcess()
    if os.environ["WORLD_SIZE"] != "1":
        parallel = TorchDistributed(select_device("cpu"), timeout_s, forming_timeout_s)
    learner = Learner(make_config(model, NUM_GROUPS, **actor), parallel, total_steps=10)
    answer("ready")
    assert sys.stdin.readline() == "go\n"
    if parallel.rank == 0:
        obey(RankLeader(learner, parallel, timeout_s), learner)
    else:
        follow(learner, parallel)
    parallel.close()


def main() -> int:
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    try:
        run(Path(arguments.pop("model")), **arguments)
    except SluiceError as error:
        answer(f"{type(error).__name__}: {error}")
        # A broken group may hold its threads; the trainer's ranks leave the same way.
        sys.stdout.flush()
        os._exit(3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
