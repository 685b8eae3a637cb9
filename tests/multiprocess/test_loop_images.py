"""A whole run of a tiny vision-language model that two ranks share, with clients' images too."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client import (
    AsyncClient,
    ChatMessage,
    ChatWithImages,
    GenerateOptions,
    Generation,
    NewPrompt,
    PromptEvent,
    Sampling,
)
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.small_run import WAIT_S, Assets, LiveRun, Record, run_to_end
from tests.support.tiny_vision import PATCH, image_file, save_model

RUN = (
    "trainer.total_training_steps=1000000",
    "trainer.total_epochs=1000",
    "trainer.save_freq=2",
    "trainer.val_before_train=true",
    "trainer.test_freq=-1",
    "trainer.n_gpus_per_node=2",
    "sluice.asynchrony.max_staleness=0",
    "sluice.rollout.replicas=2",
)
IDS = tuple(f"mine-{number}" for number in range(4))


@dataclass(slots=True)
class Seen:
    """What clients of the run received."""

    generations: list[Generation] = field(default_factory=list)
    events: list[PromptEvent] = field(default_factory=list)
    refusal: str = ""


@pytest.fixture(scope="module")
def assets(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """The small run's configuration and scorer, with a model and rows that have pictures.

    Every fourth row has none.
    """
    folder = tmp_path_factory.mktemp("pictures")
    save_model("qwen2_5_vl", folder / "model")
    rows = prompt_rows([f"{'<image>' * (index % 4 > 0)}Row {index}?" for index in range(400)])
    for index, row in enumerate(rows):
        row["images"] = [{"bytes": image_file(index)}] * (index % 4 > 0)
    write_prompts(folder / "train.parquet", rows)
    write_prompts(folder / "val.parquet", rows[:4])
    tree: dict[str, Any] = yaml.safe_load(small_assets.config.read_text(encoding="utf-8"))
    tree["data"] |= {f"{name}_files": str(folder / f"{name}.parquet") for name in ("train", "val")}
    tree["actor_rollout_ref"]["model"] = {"path": str(folder / "model")}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return Assets(folder, config)


@pytest.fixture(scope="module")
def run(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Seen]:
    seen = Seen()
    folder = tmp_path_factory.mktemp("run") / "run"
    return run_to_end(assets, folder, RUN, lambda live: _use(live, seen)), seen


async def _use(run: LiveRun, seen: Seen) -> None:
    await run.until_step(2)
    try:
        async with asyncio.timeout(WAIT_S), AsyncClient.connect(run.run_dir) as client:
            options = GenerateOptions(n=2, sampling=Sampling(max_tokens=4), deadline_s=WAIT_S)
            asked = (ChatMessage("user", "<image>Which colour?"),)
            for side in (48, 96):
                picture = image_file(0, side, side)
                found = await client.generate(ChatWithImages(asked, (picture,)), options)
                seen.generations.append(found)
            submitted = [
                NewPrompt(i, asked, "math_dapo", "red", images=[image_file(0)]) for i in IDS
            ]
            async with aclosing(client.submit(submitted)) as events:
                seen.events += [event async for event in events]
    finally:
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)


def test_every_step_is_on_policy_and_replicas_and_trainer_agree_on_every_token(
    run: tuple[Record, Seen],
) -> None:
    record, _ = run
    assert record.end.exit_code == 0, record.end.failures
    assert record.left_running == ()
    assert len(record.steps) >= 2
    assert {row["train/staleness_max"] for row in record.steps} == {0.0}
    for row in record.steps:
        assert row["training/rollout_probs_diff_max"] < 1e-3


def test_a_clients_pictures_are_sampled_for_and_trained_on(run: tuple[Record, Seen]) -> None:
    _, seen = run
    assert [len(found.rollouts) for found in seen.generations] == [2, 2]
    ended = {event.prompt_id: event.event for event in seen.events}
    assert ended.keys() == set(IDS)
    assert set(ended.values()) <= {"trained", "filtered_all_right", "filtered_all_wrong"}, ended


def test_the_checkpoint_is_a_whole_model_whose_vision_tower_was_trained(
    run: tuple[Record, Seen], assets: Assets
) -> None:
    folder = run[0].checkpoint(2) / "actor" / "huggingface"
    trained = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    before = AutoModelForImageTextToText.from_pretrained(assets.folder / "model")
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert processor.patch_size == PATCH["qwen2_5_vl"]
    first = dict(before.named_parameters())
    moved = {n for n, w in trained.named_parameters() if not torch.equal(w, first[n])}
    assert any(name.startswith("model.visual.") for name in moved)
    assert any(name.startswith("model.language_model.") for name in moved)
