"""Model and data of the run in small: choice questions in the published file's form.

Each asks which of two to four funds gained. The answer thinks about one fund after the other, and
boxes the letters. The teachers of the warm start take a gain for a loss, or a loss for a gain, four
times in ten.
"""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

from sluice.quickstart.lessons import Lesson, Segment, make_taught_model
from sluice.quickstart.model import slip_entropy
from sluice.quickstart.settings import PrepareSettings, WarmStartSettings
from sluice.quickstart.tokenizer import TURN_END, render_prompt

SLIP_RATE = 0.4
QUESTIONS = 10_000
SIZES = PrepareSettings(
    warm_start=WarmStartSettings(
        batch_dialogues=32,
        hold_until_excess_loss=0.02,
        max_hold_steps=500,
        decay_steps=100,
        wrong_step_rate=SLIP_RATE,
    )
)
WORDINGS = (
    "以下基金今年的收益率如下。哪些基金盈利？请把正确选项的字母写在\\boxed{}中。",
    "下列哪些基金的收益为正？请把字母写在\\boxed{}中。",
)


def questions(stream):
    """Yield questions without end: the text, and the gain of each letter."""
    rng = random.Random(stream)
    while True:
        letters = "ABCD"[: rng.randint(2, 4)]
        gains = {letter: rng.choice([-1, 1]) * rng.randint(1, 99) for letter in letters}
        if max(gains.values()) > 0:
            choices = "\n".join(f"{letter}：{gain:+d}%" for letter, gain in gains.items())
            yield f"{rng.choice(WORDINGS)}\n{choices}", gains


def answer_to(gains, slips, slip_rate):
    """Return the worked answer; each fund is misjudged with probability `slip_rate`."""
    judged = {letter: (gain > 0) != (slips.random() < slip_rate) for letter, gain in gains.items()}
    thought = "，".join(f"{letter}：{'盈' if good else '亏'}" for letter, good in judged.items())
    box = "".join(letter for letter, good in judged.items() if good)
    return f"<think>{thought}。</think><answer>\\boxed{{{box}}}</answer>"


def lessons(stream):
    slips = random.Random(f"{stream}/slips")
    for text, gains in questions(stream):
        answer = answer_to(gains, slips, SLIP_RATE) + TURN_END
        segments = [Segment(render_prompt(text), False), Segment(answer, True)]
        yield Lesson(segments, len(gains) * slip_entropy(SLIP_RATE))


def make(folder: Path, seed: int) -> None:
    published = folder / "cflue_mcq.json"
    published.parent.mkdir(parents=True, exist_ok=True)
    items = [
        {"instruction": text, "output": answer_to(gains, random.Random(), 0.0)}
        for text, gains in islice(questions(f"{seed}/data"), QUESTIONS)
    ]
    published.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    prepare = Path(__file__).with_name("prepare.py")
    subprocess.run(
        [sys.executable, prepare, published, folder / "data"], check=True, stdout=subprocess.DEVNULL
    )
    for split in ("train", "test"):
        (folder / "data" / f"cflue-{split}.parquet").replace(folder / "data" / f"{split}.parquet")
    make_taught_model(folder / "model", lambda purpose: lessons(f"{seed}/{purpose}"), seed, SIZES)
