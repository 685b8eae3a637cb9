"""Write calculator-train.jsonl and calculator-test.jsonl: problems such as 47 * 38 + 125.

python problems.py data
"""

import json
import random
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for split, number, seed in (("train", 20_000, 1), ("test", 256, 2)):
    rng = random.Random(seed)
    with (folder / f"calculator-{split}.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(number):
            a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(101, 999)
            row = {
                "data_source": "calculator",
                "prompt": [
                    {
                        "role": "user",
                        "content": f"What is {a} * {b} + {c}? Answer with the number alone.",
                    }
                ],
                "reward_model": {"style": "rule", "ground_truth": str(a * b + c)},
            }
            file.write(json.dumps(row) + "\n")
