"""What a new user brings: a tiny model, rows, a reward function, a configuration."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.quickstart.model import MAX_POSITIONS, make_model, save_model
from sluice.quickstart.tokenizer import save_tokenizer, train_on_texts

MODEL = "models/tiny"
_REWARD = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of digits among the response's characters."""
    digits = sum(character.isdigit() for character in solution_str)
    share = digits / max(len(solution_str), 1)
    return {"score": share, "acc": float(share > 0.1)}
'''


def build(folder: Path) -> None:
    """Write everything that the trial needs into a folder."""
    tokenizer = train_on_texts(str(each["prompt"]) for each in rows(100))
    save_model(make_model(tokenizer, seed=0), folder / MODEL)
    save_tokenizer(tokenizer, folder / MODEL, MAX_POSITIONS)
    pq.write_table(pa.Table.from_pylist(rows(560)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows(40, seed=1)), folder / "test.parquet")
    shutil.copyfile(Path(__file__).with_name("run.yaml"), folder / "run.yaml")
    (folder / "my_reward.py").write_text(_REWARD, encoding="utf-8")


def rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return rows that ask for sums."""
    chosen = random.Random(seed)
    pairs = [(chosen.randint(0, 99), chosen.randint(0, 99)) for _ in range(count)]
    return [
        {
            "data_source": "my/add",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a, b in pairs
    ]
