"""Images on their way through the real reward service: data set and clients in, trainer out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from sluice.api.reward.v1 import reward_pb2
from tests.support.image_files import png
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import failed_start, reward_process, turn
from tests.support.reward_scenarios import WAIT_S, mixed
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

VISION = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}


def model(tmp_path: Path, config: dict[str, Any]) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return str(folder)


def image_of(number: int) -> bytes:
    return png(4 + number, 3, shade=number)


def write_image_rows(tmp_path: Path, count: int) -> None:
    """In place of the configured data set: an image a row, every other one in a file."""
    rows = prompt_rows([f"<image> {content}" for content in mixed(count)])
    for number, row in enumerate(rows):
        name = f"{number}.png"
        (tmp_path / name).write_bytes(image_of(number))
        row["images"] = [{"bytes": None if number % 2 else image_of(number), "path": name}]
    write_prompts(tmp_path / "train.parquet", rows, row_group_size=16)


def number_of(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("data-"))


async def test_images_of_rows_reach_replicas_and_trainer_also_after_a_kill(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    replica = ScriptedReplica()
    config = configure(
        mixed(24), data__shuffle=False, actor_rollout_ref__model__path=model(tmp_path, VISION)
    )
    write_image_rows(tmp_path, 24)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            first = await service.take(1, 0)
            lost_id = first.batch_id
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            with pytest.raises(grpc.aio.AioRpcError, match="not leased"):
                _ = [answer async for answer in service.samples(lost_id, [0])]
            batch = await service.take(1, 0)
            await service.acknowledge(batch, 1)
            await service.announce(1, [replica])
            batches = [batch, await service.take(2, 1)]
    assert [g.images for g in first.groups] == [(image_of(i),) for i in range(8)]
    for taken in batches:
        for group in taken.groups:
            assert group.images == (image_of(number_of(group.prompt_id)),)
    for call in replica.calls:
        answer = int(call.content.split("answer=")[1].split()[0])
        assert call.images == (image_of(answer),)


def submission(name: str, content: str, *images: bytes) -> reward_pb2.SubmitPromptsRequest:
    return reward_pb2.SubmitPromptsRequest(
        prompt_id=name,
        messages=[turn(content)],
        data_source="math_dapo",
        ground_truth="1",
        images=images,
    )


async def test_images_of_clients_outlive_the_service_that_accepted_them(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    replica = ScriptedReplica()
    path = model(tmp_path, VISION)
    config = configure(mixed(1), actor_rollout_ref__model__path=path, data__train_files=None)
    requests = [submission(f"p{i}", "<image> answer=1 right=2", image_of(i)) for i in range(8)]
    hostile = {
        "bomb": submission("bomb", "<image>", png(claims=(60_000, 60_000))),
        "none": submission("none", "<image>", b""),
        "cut": submission("cut", "<image>", png()[:40]),
        "many": submission("many", "<image>" * 17, *[png()] * 17),
        "unmarked": submission("unmarked", "?", png()),
    }
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            call = service.stub.SubmitPrompts(timeout=WAIT_S)
            for request in (*requests, *hostile.values()):
                await call.write(request)
            receipts = [(await call.read()).receipt for _ in range(13)]
            service.process.kill()
            await service.wait()
        refusals = {r.prompt_id: r.refused_because for r in receipts if r.refused_because}
        assert refusals.keys() == hostile.keys()
        assert "images[0]: 60000 x 60000 pixels" in refusals["bomb"]
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            batch = await service.take(1, 0)
    assert {g.prompt_id: g.images for g in batch.groups} == {
        f"p{i}": (image_of(i),) for i in range(8)
    }


async def test_a_model_of_text_alone_refuses_images_at_both_doors(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    path = model(tmp_path, {"model_type": "qwen2"})
    config = configure(mixed(24), actor_rollout_ref__model__path=path)
    async with reward_process(config) as service:
        call = service.stub.SubmitPrompts(timeout=WAIT_S)
        await call.write(submission("p", "<image> answer=1 right=2", png()))
        receipt = (await call.read()).receipt
        call.cancel()
    assert "this run is text-only" in receipt.refused_because
    write_image_rows(tmp_path, 24)
    code, log = await failed_start(config)
    assert code != 0
    assert "train.parquet, row 0 holds images (column 'images')" in log


async def test_images_of_validation_rows_reach_replicas(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    replica = ScriptedReplica()
    config = configure(
        mixed(4),
        actor_rollout_ref__model__path=model(tmp_path, VISION),
        data__val_files=str(tmp_path / "train.parquet"),
    )
    write_image_rows(tmp_path, 4)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await service.stub.Evaluate(reward_pb2.EvaluateRequest(policy_version=0), timeout=WAIT_S)
    seen = [call.images for call in replica.calls if len(call.sample_indexes) == 1]
    assert sorted(seen) == sorted((image_of(i),) for i in range(4))
