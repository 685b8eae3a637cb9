"""A process that dies at the k-th file operation of a save, for every k.

Arguments: a folder, and the scenario. For each k a copy of the prepared checkpoints is made, a
forked child saves into it and is ended by ``os._exit`` as it begins its k-th operation below the
folder (Python's audit events: open, rename, mkdir, remove, ...). Prints the copies as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from services.trainer.learner.checkpoint import CheckpointStore
from sluice.types import DataProgress

WATCHED = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.utime"}
DIED, LONGEST = 9, 400


def write_models(folder: Path, content: str) -> None:
    """Fill ``actor`` and, beside it, ``critic``."""
    for role in (folder, folder.parent / "critic"):
        role.mkdir(parents=True)
        (role / "model.safetensors").write_text(content, encoding="utf-8")
        (role / "optimizer.safetensors").write_text(f"{content} moments", encoding="utf-8")


def write_checkpoint(
    store: CheckpointStore, step: int, write: Callable[[Path], None], progress: DataProgress
) -> Path:
    """Write a checkpoint whose ``actor`` folder `write` fills, and wait for it."""
    actor = store.begin(step)
    return store.finish(step, lambda: write(actor), progress)


def save(root: Path, step: int, content: str, keep: int | None = None) -> None:
    store = CheckpointStore(root, keep)
    write_checkpoint(store, step, lambda folder: write_models(folder, content), DataProgress(step))


def prepare(root: Path) -> None:
    save(root, 1, "first")
    save(root, 2, "second")
    os.utime(root / "global_step_1" / "data.json", (1, 1))


SCENARIOS = {
    "next step": lambda root: save(root, 3, "third"),
    "same step again": lambda root: save(root, 2, "third"),
    "with retention": lambda root: save(root, 3, "third", keep=1),
}


def die_at(root: Path, number: int) -> None:
    """End this process at operation `number` below `root`, from 1."""
    begun = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal begun
        if event in WATCHED and any(str(root) in str(one) for one in arguments[:2]):
            begun += 1
            if begun == number:
                os._exit(DIED)

    sys.addaudithook(watch)


def main() -> None:
    base, scenario = Path(sys.argv[1]), SCENARIOS[sys.argv[2]]
    prepare(base / "prepared")
    copies = []
    for number in range(1, LONGEST):
        root = base / f"died-at-{number}"
        shutil.copytree(base / "prepared", root)
        child = os.fork()
        if child == 0:
            die_at(root, number)
            scenario(root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in {0, DIED}:
            sys.exit(f"the child ended with {code} at operation {number}")
        copies.append(str(root))
        if code == 0:
            break
    sys.stdout.write(json.dumps(copies))


if __name__ == "__main__":
    main()
