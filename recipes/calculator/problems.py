"""Write train.jsonl and test.jsonl: problems such as 47 * 38 + 125."""

import json
import random

for split, number, seed in (("train", 20_000, 1), ("test", 256, 2)):
    rng = random.Random(seed)
    with open(f"{split}.jsonl", "w", encoding="utf-8") as file:
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
