"""lm-eval's accuracy of a paused run's policy, by `sluice serve-openai`, against our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.evaluation.held_run import while_held
from benchmarks.evaluation.stored import SLUICE, Evaluation, held_out_file
from benchmarks.reporting import ROOT, print_line
from sluice.config.loading.loader import load_config
from sluice.service_contract import CONFIG_NAME

MOST: Mapping[str, float] = {"lm_eval_difference": 0.0}

_ROWS = 100
_TASK = "sluice_sums"
_TASK_FILE = r"""
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["</answer>"], max_gen_toks: {tokens}, temperature: 0.0}}
filter_list:
  - name: number
    filter:
      - {{function: regex, regex_pattern: 'Answer: (-?\d+)'}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def measure(folder: Path, python: str | None) -> Mapping[str, Any]:
    """Return the difference over the first held-out problems.

    Args:
        folder: for all files.
        python: of an environment with lm-eval.
    """
    if python is None:
        raise SystemExit("give --harness-python, of the environment of `make test-harness`")
    program, found = python, dict[str, Any]()

    def look(run_dir: Path, model: Path, _step: int) -> None:
        harness = folder / "lm-eval"
        shutil.rmtree(harness, ignore_errors=True)
        benchmark = _write_rows(folder, run_dir, harness)
        with _served(run_dir) as url:
            theirs = _accuracy_of_lm_eval(program, harness, url)
        alone = Evaluation(model, benchmark, run_dir / CONFIG_NAME, harness / "ours")
        subprocess.run(alone.command(), cwd=ROOT, check=True)
        right = [bool(one.samples[0].metrics["acc"]) for one in alone.prompts().values()]
        print_line(f"lm-eval {theirs}, sluice eval {sum(right)} of {len(right)}")
        found["lm_eval_difference"] = abs(theirs - sum(right) / _ROWS)

    while_held(folder, look)
    return found


def _write_rows(folder: Path, run_dir: Path, harness: Path) -> Path:
    """Write the same rows for lm-eval and for ours; return our file."""
    harness.mkdir(parents=True)
    table = pq.read_table(held_out_file(folder)).slice(0, _ROWS)
    rows = [
        {"question": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]}
        for row in table.to_pylist()
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (harness / "rows.jsonl").write_text(lines, encoding="utf-8")
    tokens = load_config(run_dir / CONFIG_NAME, []).data.max_response_length
    task = _TASK_FILE.format(task=_TASK, rows=harness / "rows.jsonl", tokens=tokens)
    (harness / "task.yaml").write_text(task, encoding="utf-8")
    pq.write_table(table, harness / "rows.parquet")
    return harness / "rows.parquet"


@contextmanager
def _served(run_dir: Path) -> Iterator[str]:
    command = [*SLUICE, "serve-openai", str(run_dir), "--port", "0", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    ) as front:
        try:
            yield str(json.loads(front.stdout.readline() if front.stdout else "")["url"])
        finally:
            front.terminate()


def _accuracy_of_lm_eval(python: str, harness: Path, url: str) -> float:
    arguments = {
        "model": "policy",
        "base_url": f"{url}/chat/completions",
        "num_concurrent": 8,
        "max_length": 256,
    }
    command = [python, "-m", "lm_eval", "run", "--model", "local-chat-completions"]
    command += ["--include_path", str(harness), "--tasks", _TASK, "--apply_chat_template"]
    command += ["--model_args", ",".join(f"{name}={one}" for name, one in arguments.items())]
    command += ["--output_path", str(harness / "theirs")]
    print_line(" ".join(command))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run(command, cwd=harness, check=True, env=os.environ | offline)
    (file,) = (harness / "theirs").rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"][_TASK]
    return float(results["exact_match,number"])
