"""Write data/cflue-train.parquet and data/cflue-test.parquet from the published cflue_mcq.json.

    python prepare.py cflue_mcq.json data

An answer without letters in its last box is left out and counted. Every fiftieth question is for
validation; a question that repeats an earlier one is left out.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from reward import boxed_letters

EVERY = 50


def final_answer(output):
    """Return the text inside the first <answer>; without one, all of it."""
    _, tag, rest = output.partition("<answer>")
    return rest.partition("</answer>")[0] if tag else output


def row_of(item, index, split):
    return {
        "data_source": "cflue_mcq",
        "prompt": [{"role": "user", "content": item["instruction"]}],
        "ability": "finance",
        "reward_model": {
            "style": "rule",
            "ground_truth": boxed_letters(final_answer(item["output"])),
        },
        "extra_info": {
            "split": split,
            "index": index,
            "question": item["instruction"],
            "answer": item["output"],
        },
    }


def prepare(source, folder):
    """Return the numbers of rows written by split, and of those left out by reason."""
    text = Path(source).read_text(encoding="utf-8")
    items = json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
    rows, counts, seen = {"train": [], "test": []}, {"repeated": 0, "without letters": 0}, set()
    for item in items:
        if item["instruction"] in seen:
            counts["repeated"] += 1
        elif not boxed_letters(final_answer(item["output"])):
            counts["without letters"] += 1
        else:
            split = "test" if len(seen) % EVERY == 0 else "train"
            rows[split].append(row_of(item, len(rows[split]), split))
        seen.add(item["instruction"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, made in rows.items():
        file = Path(folder) / f"cflue-{split}.parquet"
        pq.write_table(pa.Table.from_pylist(made), file, row_group_size=1024)
    return {split: len(made) for split, made in rows.items()} | counts


if __name__ == "__main__":
    for what, number in prepare(sys.argv[1], sys.argv[2]).items():
        print(f"{what}: {number}")
