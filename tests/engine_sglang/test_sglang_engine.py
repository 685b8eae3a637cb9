"""What SGLang alone promises: the embedded engine's tokens, whole experts, closed sockets."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
import zmq
from sglang.srt.managers.scheduler_components import ipc_channels
from sglang.srt.server_args import PortArgs

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
from services.rollout.engines.sglang.scheduler import send_in_one_order
from sluice.errors import ConfigError, EngineError
from sluice.weight_share import Cut
from sluice.weights.share import cuts_by_name
from tests.engine_vendor.vendor import VendorInsight, make_engine
from tests.support.causal_lms import load_weights, request, weights_of
from tests.support.engine_contract_world import (
    EXPERTS,
    TIED,
    ContractWorld,
    contract_world,
    generate,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # SGLang's own
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(TIED, tmp_path_factory.mktemp(TIED))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, make_engine, VendorInsight) as running:
        yield running


async def test_the_same_seed_gives_the_tokens_of_the_embedded_engine(
    world: ContractWorld, folder: Path
) -> None:
    await world.serve(world.first)
    wanted = request(samples=4, max_tokens=40, temperature=0.8, top_p=0.9, top_k=30)
    embedded = EmbeddedEngine(EmbeddedEngineSettings(str(folder), slots=4, max_model_len=64))
    await embedded.start()
    await load_weights(embedded, weights_of(world.first, embedded), 1, "one")
    expected = await generate(embedded, wanted)
    await embedded.stop()
    found = await generate(world.engine, wanted)
    assert {i: tokens for i, (tokens, _) in found.items()} == {
        i: tokens for i, (tokens, _) in expected.items()
    }


async def test_the_best_token_at_a_temperature_is_certain(world: ContractWorld) -> None:
    await world.serve(world.first)
    wanted = request(max_tokens=8, temperature=0.7, top_k=1)
    greedy = request(max_tokens=8, temperature=0.0)
    tokens, logprobs = (await generate(world.engine, wanted))[0]
    assert tokens == (await generate(world.engine, greedy))[0][0]
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


async def test_workers_with_whole_experts_take_and_load_only_theirs(tmp_path: Path) -> None:
    save_contract_config(EXPERTS, tmp_path, key_value_heads=2)
    make = partial(make_engine, workers=2, ep_size=2)  # it does not compute on a CPU
    async with contract_world(tmp_path, make, VendorInsight, ranks=2) as world:
        for share, first in zip(world.engine.weight_shares, (0, 2), strict=True):
            of_experts = [cuts for name, cuts in cuts_by_name(share).items() if "experts" in name]
            assert of_experts == [(Cut(0, ((first, 2),)),)] * 4
        await world.serve(world.first)


async def test_what_sglang_refuses_is_reported_and_leaves_nothing(folder: Path) -> None:
    engine = make_engine(folder, attention_backend="no_such_backend")
    opened = _open_sockets()
    with pytest.raises((ConfigError, EngineError), match=r"SGLang 0\.5\.23 did not start"):
        await engine.start()
    assert _open_sockets() <= opened


async def test_a_stopped_engine_leaves_no_open_socket_to_the_garbage_collector(
    folder: Path,
) -> None:
    engine, before = make_engine(folder), _open_sockets()
    await engine.start()
    opened = _open_sockets() - before
    await engine.stop()
    assert len(opened) >= 2
    assert opened & _open_sockets() == set()


def _open_sockets() -> set[int]:
    found = [one for one in gc.get_objects() if issubclass(type(one), zmq.Socket)]
    return {one.underlying for one in found if not one.closed}


async def test_an_answer_of_the_scheduler_comes_after_the_tokens_that_it_sent_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    made = ipc_channels.SchedulerIpcChannels
    monkeypatch.setattr(made, "create", made.create)
    send_in_one_order()
    names = {name: f"ipc://{tmp_path / name}" for name in PortArgs.__dataclass_fields__}
    with zmq.Context(2) as context, context.socket(zmq.PULL) as arrived:
        arrived.bind(names["tokenizer_ipc_name"])
        arrived.setsockopt(zmq.RCVTIMEO, 30_000)
        channels = made.create(
            port_args=SimpleNamespace(**names),
            is_rank_zero=True,
            skip_tokenizer_init=True,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        assert not [one for one in recwarn if one.category is ResourceWarning], "left open"
        tokens, answer = bytes(1 << 22), b"answer"
        for _ in range(20):
            channels.send_to_detokenizer.socket.send(tokens)
            channels.send_to_tokenizer.socket.send(answer)
        sizes = [len(arrived.recv()) for _ in range(40)]
        channels.send_to_tokenizer.socket.context.destroy(linger=0)
    assert sizes == [len(tokens), len(answer)] * 20
