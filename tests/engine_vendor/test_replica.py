"""A whole replica with the vendor's engine: its process, its weights, and what clients get of it.

Its engine is one of this environment, on a GPU if torch finds one; the trainer that it registers
with is a stand-in that takes one replica on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel

from services.rollout.engines.causal_lm import build_causal_lm
from services.trainer.fleet.replica_client import ReplicaClient
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client import AsyncClient, GenerateOptions, RunAddress, Sampling
from sluice.codec.fields import token_ids_to_bytes
from sluice.device.cpu import CpuDevice
from sluice.quickstart.tokenizer import save_tokenizer
from sluice.rpc.client import ChannelPool, open_channel, rollout_stub
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weights.sender import WeightSender
from tests.engine_vendor.vendor import VENDOR
from tests.support.causal_lms import VOCABULARY, expected_logprobs, reference_model
from tests.support.engine_contract_world import PLAIN, TIED, TOLERANCE, save_contract_config
from tests.support.rpc_server import serving
from tests.support.weight_buffers import buffer_of

_ROOT = Path(__file__).parents[2]
_MESSAGE_BYTES = 1 << 24
_RUN_TIMEOUT_S = 400
_PROMPT = (5, 9, 23, 54)
_RESPONSE_TOKENS = 40


async def check_replica(engine: str, folder: Path) -> None:
    """Has a replica take weights over gRPC, serve clients, and end by a signal.

    Args:
        engine: its name in `actor_rollout_ref.rollout.name`.
        folder: empty.

    Raises:
        AssertionError: it ended, or clients got something else than the model's samples.
    """
    save_contract_config(TIED, folder)
    _save_tokenizer(folder)
    model, trainer = reference_model(folder, seed=1), _Trainer()
    async with (
        asyncio.timeout(_RUN_TIMEOUT_S),
        serving(trainer=trainer) as server,
        _replica(engine, folder, server.port) as process,
        asyncio.TaskGroup() as tasks,
    ):
        ended = tasks.create_task(process.wait())
        await asyncio.wait((trainer.replica, ended), return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"the replica ended with {process.returncode}"
        replica = trainer.replica.result()
        await _publish(replica, folder, model)
        text = await _check_samples(replica, model)
        await _check_stop_string(replica, text)
        process.terminate()
        assert await ended == 0


class _Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Takes one replica on."""

    def __init__(self) -> None:
        self.replica: asyncio.Future[ReplicaInfo] = asyncio.get_running_loop().create_future()

    async def RegisterReplica(self, request: Any, context: Any) -> Any:
        one = request.replica
        self.replica.set_result(ReplicaInfo(one.name, one.instance_id, one.address, one.slots))
        return trainer_pb2.RegisterReplicaResponse(
            heartbeat_interval_seconds=1, time_to_live_seconds=60
        )

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        return trainer_pb2.HeartbeatResponse()


def _save_tokenizer(folder: Path) -> None:
    """One letter a token."""
    letters = {chr(0x100 + token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x100)))
    tokenizer.decoder = decoders.Fuse()
    save_tokenizer(tokenizer, folder, 512)


@asynccontextmanager
async def _replica(
    engine: str, folder: Path, trainer_port: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / "run.yaml"
    config.write_text("sluice: {log_level: INFO}\n", encoding="utf-8")
    keys = {
        "actor_rollout_ref.model.path": folder,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.max_num_seqs": 8,
        "data.max_prompt_length": 64,
        "data.max_response_length": 128,
        "sluice.rollout.device": "cuda" if torch.cuda.is_available() else "cpu",
        "sluice.trainer.endpoint.host": "127.0.0.1",
        "sluice.trainer.endpoint.port": trainer_port,
        "sluice.weights.backend": "gloo",
    }
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.rollout", "--config", str(config), "--name", "replica"),
        *(f"{key}={value}" for key, value in keys.items()),
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def weight_layout(folder: Path) -> tuple[TensorSpec, ...]:
    """The weights of the model in a folder, as a replica with a vendor's engine finds them."""
    return build_causal_lm(str(folder), torch.device("meta")).layout.tensors


async def _publish(replica: ReplicaInfo, folder: Path, model: PreTrainedModel) -> None:
    layout, state = weight_layout(folder), model.state_dict()
    given_up = threading.Event()
    sender = WeightSender(device=CpuDevice(), bucket_bytes=1 << 16, timeout_s=60.0)
    channels = ChannelPool(_MESSAGE_BYTES)
    client = ReplicaClient(
        replica, channels, timeout_s=60, transfer_timeout_s=60, commit_timeout_s=60
    )
    buffer = buffer_of({spec.name: state[spec.name] for spec in layout})
    try:
        spec = sender.form_group(1, [replica.name], layout)[replica.name]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sender.join, given_up))
            tasks.create_task(client.join(spec))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sender.broadcast, buffer, 1, given_up))
            staged = tasks.create_task(client.stage(1, 1))
        await client.commit(1, 1, staged.result())
    finally:
        given_up.set()
        sender.close()
        await client.close()
        await channels.close()


async def _check_samples(replica: ReplicaInfo, model: PreTrainedModel) -> str:
    """Two samples through the SDK's client; returns the text of the first."""
    sampling = Sampling(max_tokens=_RESPONSE_TOKENS, seed=5, ignore_eos=True)
    options = GenerateOptions(n=2, sampling=sampling)
    async with AsyncClient(RunAddress(replicas=(replica.address,))) as client:
        sampled = await client.generate(list(_PROMPT), options)
    for sample in sampled.rollouts:
        tokens = sample.token_ids.tolist()
        exact = expected_logprobs(model, _PROMPT, tokens, PLAIN)
        np.testing.assert_allclose(sample.behavior_logprobs, exact, atol=TOLERANCE)
        assert (len(tokens), len(sample.text)) == (_RESPONSE_TOKENS, _RESPONSE_TOKENS)
    return sampled.rollouts[0].text


async def _check_stop_string(replica: ReplicaInfo, text: str) -> None:
    """Two letters of the same sample end it, over plain gRPC."""
    stop = text[8:10]
    sampling = common.SamplingParams(
        max_tokens=_RESPONSE_TOKENS, seed=5, ignore_eos=True, stop=[stop]
    )
    tokens = common.TokenPrompt(token_ids_u32=token_ids_to_bytes(np.array(_PROMPT, np.uint32)))
    request = rollout.GenerateRequest(
        prompt=common.PromptInput(tokens=tokens), sample_indexes=[0], sampling=sampling
    )
    async with open_channel(replica.address, max_message_bytes=_MESSAGE_BYTES) as channel:
        answers = [one async for one in rollout_stub(channel).Generate(request, timeout=60)]
    stopped, end = answers[-1].rollouts[0], text.index(stop)
    assert (stopped.text, len(stopped.token_ids_u32)) == (text[:end], 4 * (end + len(stop)))


pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # the vendor's own


async def test_a_replica_takes_weights_and_serves_clients(tmp_path: Path) -> None:
    await check_replica(str(VENDOR), tmp_path)
