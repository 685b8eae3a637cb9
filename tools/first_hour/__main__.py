"""Try the how-tos as a new user types them, and the wheel: `make first-hour`.

The last line printed is one JSON object: `howtos_tried`, `wheel_ok`, `phases` and `problems`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.quickstart.model import MAX_POSITIONS, make_model, save_model
from sluice.quickstart.tokenizer import save_tokenizer, train_on_texts
from tools.commands import CommandError, output_of
from tools.first_hour.howtos import tried_pages, typed_command
from tools.phases import Phases, conclude, tool_parser

ROOT = Path(__file__).resolve().parents[2]
_MODEL = "models/tiny"
_REWARD = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of digits among the response's characters."""
    digits = sum(character.isdigit() for character in solution_str)
    share = digits / max(len(solution_str), 1)
    return {"score": share, "acc": float(share > 0.1)}
'''
_PIP_S = 900.0
_STEPS = 7  # of the run whose folder the how-tos read


def main() -> int:
    """Run the trial."""
    parser = tool_parser(__doc__, "python -m tools.first_hour --no-wheel")
    parser.add_argument("--wheel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--howto", nargs="*", help="only these how-tos; none: all")
    arguments = parser.parse_args()
    phases = Phases()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        user = Path(name) / "user"
        user.mkdir()
        _build(user)
        with phases.phase("a run"):
            steps = f"trainer.total_training_steps={_STEPS}"
            code, output = typed_command(
                [sys.executable, "-m", "sluice", "up", "run.yaml", steps], user
            )
        problems = [f"the run ended with code {code}:\n{output[-2000:]}"] if code else []
        with phases.phase("how-tos"):
            pages = tried_pages(ROOT / "docs" / "how-to", user, arguments.howto)
        problems += [f"how-to {page}: {text}" for page, text in pages.items() if text]
        is_wheel_ok = False
        if arguments.wheel:
            with phases.phase("wheel"):
                try:
                    _try_wheel(Path(name))
                    is_wheel_ok = True
                except CommandError as error:
                    problems.append(f"wheel: {error}")
    report = {
        "howtos_tried": sum(not text for text in pages.values()),
        "wheel_ok": is_wheel_ok,
        "phases": phases.seconds,
    }
    return conclude(report, problems)


def _build(folder: Path) -> None:
    """Write everything that the trial needs into a folder."""
    tokenizer = train_on_texts(str(each["prompt"]) for each in _rows(100))
    save_model(make_model(tokenizer, seed=0), folder / _MODEL)
    save_tokenizer(tokenizer, folder / _MODEL, MAX_POSITIONS)
    pq.write_table(pa.Table.from_pylist(_rows(560)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(_rows(40, seed=1)), folder / "test.parquet")
    shutil.copyfile(Path(__file__).with_name("run.yaml"), folder / "run.yaml")
    (folder / "my_reward.py").write_text(_REWARD, encoding="utf-8")


def _rows(count: int, seed: int = 0) -> list[dict[str, object]]:
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


def _try_wheel(folder: Path) -> None:
    """Install the wheel into an empty environment, and use it outside of the checkout.

    Raises:
        CommandError: a command failed.
    """
    pip = (str(folder / "venv" / "bin" / "python"), "-m", "pip", "--quiet")
    output_of(sys.executable, "-m", "venv", str(folder / "venv"), timeout_s=_PIP_S)
    output_of(*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT), timeout_s=_PIP_S)
    (wheel,) = folder.glob("sluice-*.whl")
    constraints = str(ROOT / "constraints.txt")
    output_of(*pip, "install", "-c", constraints, str(wheel), timeout_s=_PIP_S)
    sluice = str(folder / "venv" / "bin" / "sluice")
    output_of(sluice, "config", "explain", "data.train_batch_size", timeout_s=60.0, folder=folder)
    output_of(sluice, "--version", "-v", timeout_s=60.0, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
