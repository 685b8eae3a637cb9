"""Model and data of the run in small: programs of one to three lines that print a, b computed.

A teacher of the warm start takes another operation than the one asked for, four times in ten.
"""

import json
import random
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.quickstart.lessons import Lesson, Segment, make_taught_model
from sluice.quickstart.model import slip_entropy
from sluice.quickstart.settings import PrepareSettings, WarmStartSettings
from sluice.quickstart.tokenizer import TURN_END, render_prompt

SLIP_RATE = 0.4
SIZES = PrepareSettings(
    warm_start=WarmStartSettings(
        batch_dialogues=32,
        hold_until_excess_loss=0.02,
        max_hold_steps=500,
        decay_steps=100,
        wrong_step_rate=SLIP_RATE,
    )
)
# What is asked, its program text, and its value. A slip takes the next one.
OPERATIONS = (
    ("sum", "a + b", lambda a, b: a + b),
    ("difference", "a - b", lambda a, b: a - b),
    ("product", "a * b", lambda a, b: a * b),
    ("quotient", "a // b", lambda a, b: a // b),
    ("remainder", "a % b", lambda a, b: a % b),
)
TESTS = ((7, 3), (58, 9), (-4, 15))


def problems(stream):
    """Yield problems without end: the operations asked for, in order."""
    rng = random.Random(stream)
    while True:
        yield [rng.randrange(len(OPERATIONS)) for _ in range(rng.randint(1, 3))]


def question(asked):
    names = ", then the ".join(OPERATIONS[one][0] for one in asked)
    return f"Read integers a and b from one line. Print the {names}, each on a line of its own."


def program(operations):
    lines = "".join(f"print({OPERATIONS[one][1]})\n" for one in operations)
    return f"```python\na, b = map(int, input().split())\n{lines}```"


def tests(asked):
    outputs = ["".join(f"{OPERATIONS[one][2](a, b)}\n" for one in asked) for a, b in TESTS]
    return json.dumps({"inputs": [f"{a} {b}\n" for a, b in TESTS], "outputs": outputs})


def row_of(asked, index, split):
    return {
        "data_source": "codecontests",
        "prompt": [{"role": "user", "content": question(asked)}],
        "ability": "code",
        "reward_model": {"ground_truth": tests(asked), "style": "rule"},
        "extra_info": {"split": split, "index": index},
    }


def lessons(stream):
    slips = random.Random(f"{stream}/slips")
    for asked in problems(stream):
        written = [(one + (slips.random() < SLIP_RATE)) % len(OPERATIONS) for one in asked]
        prompt = Segment(render_prompt(question(asked)), False)
        answer = Segment(program(written) + TURN_END, True)
        yield Lesson([prompt, answer], len(asked) * slip_entropy(SLIP_RATE))


def make(folder: Path, seed: int) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, number in (("train", 4_000), ("test", 128)):
        asked = islice(problems(f"{seed}/{split}"), number)
        rows = [row_of(one, index, split) for index, one in enumerate(asked)]
        file = folder / "data" / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=1024)
    make_taught_model(folder / "model", lambda purpose: lessons(f"{seed}/{purpose}"), seed, SIZES)
