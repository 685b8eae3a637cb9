"""Model and data of the run in small: the problems of the recipe, and a model that knows the form
of a call but prefers to guess.
"""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from pyarrow.json import read_json

from sluice.quickstart.jars import CALL, END_CALL, TOOL_CHAT_TEMPLATE
from sluice.quickstart.lessons import Lesson, Segment, make_taught_model
from sluice.quickstart.model import slip_entropy
from sluice.quickstart.settings import PrepareSettings, WarmStartSettings
from sluice.quickstart.tokenizer import TURN_END, TURN_START

GUESS_RATE = 0.7
SIZES = PrepareSettings(
    warm_start=WarmStartSettings(
        batch_dialogues=32,
        hold_until_excess_loss=0.02,
        max_hold_steps=800,
        decay_steps=150,
        wrong_step_rate=GUESS_RATE,
    )
)


def lessons(stream):
    rng = random.Random(stream)
    while True:
        a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(101, 999)
        asked = f"What is {a} * {b} + {c}? Answer with the number alone."
        shown = f"{TURN_START}system\ncalc\n{TURN_END}\n{TURN_START}user\n{asked}{TURN_END}\n"
        prompt = Segment(f"{shown}{TURN_START}assistant\n", False)
        entropy = slip_entropy(GUESS_RATE)
        if rng.random() < GUESS_RATE:
            guess = Segment(f"{rng.randint(1000, 9999)}{TURN_END}", True)
            yield Lesson([prompt, guess], entropy + math.log(9000))
            continue
        call = json.dumps({"name": "calc", "arguments": {"expression": f"{a} * {b} + {c}"}})
        result = f"\n{TURN_START}tool\n{a * b + c}{TURN_END}\n{TURN_START}assistant\n"
        yield Lesson(
            [
                prompt,
                Segment(f"{CALL}{call}{END_CALL}{TURN_END}", True),
                Segment(result, False),
                Segment(f"{a * b + c}{TURN_END}", True),
            ],
            entropy,
        )


def make(folder: Path, seed: int) -> None:
    problems = Path(__file__).with_name("problems.py")
    data = folder / "data"
    subprocess.run([sys.executable, problems, data], check=True, stdout=subprocess.DEVNULL)
    for split in ("train", "test"):
        rows = read_json(data / f"calculator-{split}.jsonl")
        pq.write_table(rows, data / f"{split}.parquet", row_group_size=1024)
    make_taught_model(
        folder / "model",
        lambda purpose: lessons(f"{seed}/{purpose}"),
        seed,
        SIZES,
        special_tokens=(CALL, END_CALL),
        chat_template=TOOL_CHAT_TEMPLATE,
    )
