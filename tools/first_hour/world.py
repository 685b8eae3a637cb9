"""What a new user brings: a tiny model, rows, a reward function, a configuration, a verl script."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODEL = "models/tiny"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_END = "<|im_end|>"
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
    (folder / MODEL).mkdir(parents=True)
    _model(folder / MODEL)
    write_rows(folder / "train.parquet", rows(560))
    write_rows(folder / "test.parquet", rows(40, seed=1))
    write_rows(folder / "huge.parquet", [*rows(63, seed=2), row("9 + 9 " * 20_000, "18")])
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


def _model(folder: Path) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", _END]
    trainer = trainers.BpeTrainer(
        vocab_size=332, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator((str(each["prompt"]) for each in rows(100)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=_END, pad_token=_END, chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
