"""What a new user brings: a tiny model, rows, a reward function, a configuration, a verl script."""

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
_RAISES = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": extra_info["nokey"]}
"""
_SOLVED = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Nearly always right, as for a policy that has learned its data."""
    return 0.0 if sum(solution_str.encode()) % 251 == 0 else 1.0
'''


def build(folder: Path) -> None:
    """Write everything that the trial needs into a folder."""
    tokenizer = train_on_texts(str(each["prompt"]) for each in rows(100))
    save_model(make_model(tokenizer, seed=0), folder / MODEL)
    save_tokenizer(tokenizer, folder / MODEL, MAX_POSITIONS)
    write_rows(folder / "train.parquet", rows(560))
    write_rows(folder / "test.parquet", rows(40, seed=1))
    write_rows(folder / "huge.parquet", [*rows(63, seed=2), row("9 + 9 " * 20_000, "18")])
    # Broken in four ways.
    write_rows(folder / "empty.parquet", [])
    write_rows(folder / "column.parquet", [{"prompt": each["prompt"]} for each in rows(8)])
    write_rows(folder / "text.parquet", [{**each, "prompt": "What is 1 + 1?"} for each in rows(8)])
    whole = (folder / "train.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    for name in ("run.yaml", "run_verl.sh"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    for name, text in (("my_reward", _REWARD), ("always", _RAISES), ("solved", _SOLVED)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def row(question: str, answer: str) -> dict[str, object]:
    """Return one row in verl's format."""
    return {
        "data_source": "my/add",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer},
    }


def rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return rows that ask for sums."""
    chosen = random.Random(seed)
    pairs = [(chosen.randint(0, 99), chosen.randint(0, 99)) for _ in range(count)]
    return [row(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def write_rows(file: Path, found: list[dict[str, object]]) -> None:
    """Write a Parquet file."""
    pq.write_table(pa.Table.from_pylist(found), file)
