"""lm-eval and inspect-ai, as they are, evaluate a policy at `sluice serve-openai`.

The policy is the quickstart's warm-started model on a replica in this process. Each figure of a
harness is compared with what our own client and scorer make of the same questions.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.reward.grading.scorers.math_dapo import compute_score
from services.rollout.__main__ import _encoder, _server
from services.rollout.servicer import ReplicaIdentity
from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    RunAddress,
    Sampling,
    ScoredPrompt,
)
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.quickstart.prepare import prepare
from sluice.rpc.credentials import OPEN
from tests.support.causal_lms import running_engine
from tests.support.rpc_server import serving
from tests.support.threaded_run import FleetTrainer, GradingReward

TASKS = Path(__file__).with_name("tasks")
ROWS, SLOTS = 100, 32
MAX_PROMPT, MAX_MODEL_LEN, MAX_TOKENS = 64, 256, 96
RUNS_S = 600.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(2 * RUNS_S, func_only=True),
]


@dataclass(frozen=True, slots=True)
class Served:
    """A policy that `sluice serve-openai` serves.

    Attributes:
        url: of the front, with ``/v1``.
        replica: address of its replica.
        model: folder of its model and tokenizer.
        rows: questions with their answer, choices, and the place of the answer among these.
        folder: holds the rows as ``rows.jsonl``.
    """

    url: str
    replica: str
    model: Path
    rows: tuple[dict[str, Any], ...]
    folder: Path

    def client(self) -> AsyncClient:
        """A client of ours."""
        return AsyncClient(RunAddress(replicas=(self.replica,)))

    async def run(self, *words: str, **environment: str) -> None:
        """Run a module of the harnesses' environment to its end, without a network's help."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}
        log = self.folder / "harness.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(os.environ["SLUICE_HARNESS_PYTHON"], "-m", *words),
                cwd=self.folder,
                env=os.environ | offline | environment,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(RUNS_S):
                    code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert code == 0, log.read_text()[-4000:]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The quickstart's model behind `sluice serve-openai`, and rows to ask it."""
    folder = tmp_path_factory.mktemp("served")
    assets = await asyncio.to_thread(
        prepare, folder / "assets", task="quickstart", seed=0, progress=lambda _: None
    )
    rows = make_rows(assets.val_file)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    trainer = FleetTrainer()
    async with (
        serving(trainer=trainer, reward=GradingReward()) as run,
        replica(assets.model_dir) as address,
        front(folder, run.port) as url,
    ):
        trainer.address = address
        yield Served(url, address, assets.model_dir, rows, folder)


def make_rows(file: Path) -> tuple[dict[str, Any], ...]:
    """The first held-out problems; three wrong numbers are near each answer."""
    draw, rows = random.Random(7), []
    for number, row in enumerate(pq.read_table(file).slice(0, ROWS).to_pylist()):
        answer = int(row["reward_model"]["ground_truth"])
        choices = [answer, *draw.sample([answer + step for step in (-10, -2, -1, 1, 2, 10)], 3)]
        draw.shuffle(choices)
        rows.append(
            {
                "id": number,
                "question": row["prompt"][0]["content"],
                "answer": str(answer),
                "choices": [f" {choice}" for choice in choices],
                "gold": choices.index(answer),
            }
        )
    assert len(rows) == ROWS
    return tuple(rows)


def settings(*more: str) -> tuple[str, ...]:
    """Of the run that the front and its replica belong to."""
    return (
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_MODEL_LEN - MAX_PROMPT}",
        "sluice.rollout.endpoint.host=127.0.0.1",
        "sluice.rollout.endpoint.port=0",
        *more,
    )


@asynccontextmanager
async def replica(model_dir: Path) -> AsyncIterator[str]:
    """The address of a replica with the model of a folder."""
    config = load_config(None, settings(f"actor_rollout_ref.model.path={model_dir}"))
    model = AutoModelForCausalLM.from_pretrained(model_dir).requires_grad_(False)
    limits = {"slots": SLOTS, "max_model_len": MAX_MODEL_LEN}
    async with running_engine(model_dir, model, **limits) as engine:
        identity = ReplicaIdentity("rollout-0", "one")
        server = _server(config, engine, _encoder(config), identity, OPEN)
        await server.start()
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


@asynccontextmanager
async def front(folder: Path, port: int) -> AsyncIterator[str]:
    """The URL of `sluice serve-openai` for a run whose services are at a port."""
    own = (f"sluice.trainer.endpoint.port={port}", f"sluice.reward.endpoint.port={port}")
    write_config(load_config(None, settings(*own)), folder / "config.yaml")
    words = ("serve-openai", str(folder), "--port", "0", "--json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield str(json.loads(line)["url"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


Evaluated = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]
"""By task of lm-eval, its results, and what it logged of each row, in order."""


async def lm_eval(
    served: Served, tasks: tuple[str, ...], model: str, path: str, *words: str, **more: object
) -> Evaluated:
    """Run tasks of lm-eval on chats rendered by the model's template."""
    output = served.folder / model
    arguments = {
        "model": "policy",
        "base_url": f"{served.url}/{path}",
        "num_concurrent": 8,
        "max_length": MAX_MODEL_LEN,
        **more,
    }
    await served.run(
        *("lm_eval", "run", "--model", model, "--include_path", str(TASKS), "--tasks", *tasks),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--apply_chat_template", "--output_path", str(output), "--log_samples", *words),
    )
    (results,) = output.rglob("results_*.json")
    by_task = json.loads(results.read_text(encoding="utf-8"))["results"]
    evaluated: Evaluated = {}
    for task in tasks:
        (samples,) = output.rglob(f"samples_{task}_*.jsonl")
        logged = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        evaluated[task] = (by_task[task], sorted(logged, key=lambda one: one["doc_id"]))
    return evaluated


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def by_completions(served: Served) -> Evaluated:
    """Both tasks by /v1/completions, several prompts of token ids in a request."""
    tasks = ("sums_choice", "sums_answer")
    words = ("--batch_size", "4")
    model, path = "local-completions", "completions"
    return await lm_eval(served, tasks, model, path, *words, tokenizer=served.model)


async def loglikelihood(client: AsyncClient, context: list[int], choice: list[int]) -> float:
    """The log-likelihood of tokens after others, by our own client."""
    options = GenerateOptions(sampling=Sampling(max_tokens=1), prompt_logprobs=True)
    async with aclosing(client.stream([*context, *choice], options)) as events:
        (scored,) = [event async for event in events if isinstance(event, ScoredPrompt)]
    return sum(scored.logprobs.logprobs[-len(choice) :].tolist())


async def test_lm_evals_accuracy_by_log_likelihoods_is_that_of_our_own(
    served: Served, by_completions: Evaluated
) -> None:
    results, logged = by_completions["sums_choice"]
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    right = 0
    async with served.client() as client:
        for row, of_harness in zip(served.rows, logged, strict=True):
            turns = [{"role": "user", "content": row["question"]}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            # As the harness splits them: space at the end of a prompt belongs to the choices.
            context = tokenizer(text.rstrip(), add_special_tokens=False).input_ids
            ours = []
            for choice in row["choices"]:
                whole = tokenizer(text + choice, add_special_tokens=False).input_ids
                ours.append(await loglikelihood(client, context, whole[len(context) :]))
            theirs = [float(value) for ((value, _),) in of_harness["resps"]]
            assert theirs == pytest.approx(ours, abs=1e-4)
            right += ours.index(max(ours)) == row["gold"]
    assert 0 < right < ROWS
    assert results["acc,none"] - right / ROWS == 0


def accuracy(served: Served, responses: list[str]) -> float:
    """What the run's own scorer gives these responses."""
    scores = [
        compute_score(response, row["answer"])["acc"]
        for response, row in zip(responses, served.rows, strict=True)
    ]
    return sum(map(float, scores)) / ROWS


async def greedy(served: Served) -> list[str]:
    """Responses to the rows by our own client."""
    options = GenerateOptions(sampling=Sampling(temperature=0.0, max_tokens=MAX_TOKENS))
    async with served.client() as client, asyncio.TaskGroup() as tasks:
        questions = [row["question"] for row in served.rows]
        asked = [
            tasks.create_task(client.generate([ChatMessage("user", text)], options))
            for text in questions
        ]
    return [task.result().texts[0] for task in asked]


async def test_lm_evals_accuracy_of_chats_is_that_of_our_own_scorer(served: Served) -> None:
    path = ("local-chat-completions", "chat/completions")
    results, logged = (await lm_eval(served, ("sums_answer",), *path))["sums_answer"]
    responses = [one["resps"][0][0] for one in logged]
    assert responses == await greedy(served)
    assert 0 < accuracy(served, responses) < 1
    assert results["exact_match,number"] - accuracy(served, responses) == 0


async def test_lm_evals_accuracy_of_completions_is_that_of_our_own_scorer(
    served: Served, by_completions: Evaluated
) -> None:
    results, logged = by_completions["sums_answer"]
    responses = [one["resps"][0][0] for one in logged]
    assert responses == await greedy(served)
    assert results["exact_match,number"] - accuracy(served, responses) == 0


async def test_inspect_ais_accuracy_is_that_of_our_own_scorer(served: Served) -> None:
    # inspect-ai finds tasks below the current folder, and dataset files beside their task.
    task, logs = shutil.copy(TASKS / "inspect_sums.py", served.folder), served.folder / "inspect"
    await served.run(
        *("inspect_ai", "eval", Path(task).name),
        *("--model", "openai-api/sluice/policy"),
        *("--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--log-dir", str(logs)),
        *("--log-format", "json", "--display", "none"),
        SLUICE_BASE_URL=served.url,
        SLUICE_API_KEY="none",
    )
    (file,) = logs.glob("*.json")
    log = json.loads(file.read_text(encoding="utf-8"))
    assert log["status"] == "success", log.get("error")
    logged = sorted(log["samples"], key=lambda one: int(one["id"]))
    responses = [one["output"]["choices"][0]["message"]["content"] for one in logged]
    assert responses == await greedy(served)
    metrics = log["results"]["scores"][0]["metrics"]
    assert metrics["accuracy"]["value"] - accuracy(served, responses) == 0
