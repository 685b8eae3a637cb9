"""How the members of a group find each other, and how that ends when one does not come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice.weights
from sluice.config.addresses import join_host_port
from sluice.device.cpu import CpuDevice
from sluice.errors import DeadlineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights import group, rendezvous
from sluice.weights.backend import ProcessGroup
from sluice.weights.plan import tensor_specs
from sluice.weights.receiver import WeightReceiver
from sluice.weights.rendezvous import EpochStore, RendezvousStore, gather
from sluice.weights.sender import WeightSender
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_buffers import buffer_of
from tests.support.weight_rendezvous import KEY, give_calls_time, link_to, make_spec

_WEIGHTS = {"w": torch.arange(9.0)}
_TENSORS = tensor_specs(_WEIGHTS.items())
_NEVER = threading.Event()
_NEEDS_IPV6 = pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def _sender(
    timeout_s: float, host: str = "127.0.0.1", bind_host: str | None = None
) -> WeightSender:
    return WeightSender(
        device=CpuDevice(), bucket_bytes=4096, timeout_s=timeout_s, host=host, bind_host=bind_host
    )


@pytest.mark.parametrize(
    ("host", "bind_host"),
    [
        ("127.0.0.1", None),
        ("127.0.0.1", "0.0.0.0"),
        pytest.param("::1", None, marks=_NEEDS_IPV6),
        pytest.param("[::1]", None, marks=_NEEDS_IPV6),
        pytest.param("[::1]", "::", marks=_NEEDS_IPV6),
        pytest.param("127.0.0.1", "::", marks=_NEEDS_IPV6),
    ],
)
def test_a_group_forms_at_any_address_of_either_family(
    pool: ThreadPoolExecutor, host: str, bind_host: str | None
) -> None:
    receivers = {name: WeightReceiver(CpuDevice()) for name in ("r0", "r1")}
    with closing(_sender(60.0, host, bind_host)) as sender:
        specs = sender.form_group(1, list(receivers), _TENSORS)
        joined = [pool.submit(receivers[name].join, spec) for name, spec in specs.items()]
        sender.join(_NEVER)
        assert [done.result(60) for done in joined] == [specs["r0"].plan_digest] * 2
        staged = [pool.submit(receiver.stage, 1) for receiver in receivers.values()]
        report = sender.broadcast(buffer_of(_WEIGHTS), 1, _NEVER)
        assert {done.result(60).digest for done in staged} == {report.bases[0].digest}
        for receiver in receivers.values():
            receiver.close()
    assert wait_for_retired_threads(60) == 0


def _announce(spec: TransferGroupSpec) -> None:
    """As a member does that dies before it reaches torch's constructor."""
    spec = replace(spec, timeout_s=0.05)
    with pytest.raises(DeadlineError):
        gather(EpochStore(spec, "joining", "trainer", lambda: None), spec, {0: "trainer", 1: "r0"})


def test_a_member_that_dies_after_it_came_ends_the_formation_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_calls_time(monkeypatch)
    with closing(_sender(0.5)) as sender:
        _announce(sender.form_group(1, ["r0"], _TENSORS)["r0"])
        with pytest.raises(
            DeadlineError, match=r"^r0: no answer within 0.5 s while forming .* epoch 1"
        ):
            sender.join(_NEVER)
    assert wait_for_retired_threads(60) == 0


def test_a_stop_reaches_into_torchs_constructor_and_leaves_no_thread_behind(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_calls_time(monkeypatch)
    stop, constructing, create = threading.Event(), threading.Event(), group.create_process_group

    def noted(*arguments: Any) -> ProcessGroup:
        constructing.set()
        return create(*arguments)

    monkeypatch.setattr(group, "create_process_group", noted)
    with closing(_sender(600.0)) as sender:
        _announce(sender.form_group(1, ["r0"], _TENSORS)["r0"])
        joining = pool.submit(sender.join, stop)
        assert constructing.wait(60)
        stop.set()
        with pytest.raises(WeightSyncError, match=r"with r0 .*stopped by the caller"):
            joining.result(60)
    assert wait_for_retired_threads(60) == 0  # long before the 600 s that torch was given


def test_a_late_member_of_an_epoch_that_is_over_is_refused_with_the_reason() -> None:
    with closing(_sender(60.0)) as sender:
        late = sender.form_group(1, ["r0"], _TENSORS)["r0"]
        sender.form_group(2, ["r0"], _TENSORS)
        with pytest.raises(WeightSyncError, match=r"forming .*the epoch is over or has not begun"):
            WeightReceiver(CpuDevice()).join(late)


def test_a_store_that_does_not_answer_is_named_with_the_phase() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        link = EpochStore(make_spec(port, timeout_s=0.1), "forming epoch 1", "r0", lambda: None)
        with pytest.raises(
            DeadlineError, match=f"^store 127.0.0.1:{port}: no answer within 0.1 s while forming"
        ):
            gather(link, make_spec(port), {})


def test_a_store_that_is_gone_is_named_with_the_phase() -> None:
    with closing(RendezvousStore("127.0.0.1")) as store:
        store.begin(1, KEY)
        link = link_to(store)
    with pytest.raises(WeightSyncError, match=r"store 127.0.0.1:\d+ .*forming epoch 1: cannot con"):
        gather(link, make_spec(store.port), {})


@pytest.mark.parametrize(
    ("host", "shown"),
    [("10.0.0.1", "10.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("node-3", "node-3:7")],
)
def test_addresses_are_shown_as_people_write_them(host: str, shown: str) -> None:
    assert join_host_port(host, 7) == shown


def test_torchs_tcp_store_is_not_used() -> None:
    """It asks a name server for each peer's name: a lost answer outlasts a formation."""
    files = list(Path(sluice.weights.__path__[0]).glob("*.py"))
    assert files
    assert not [file.name for file in files if "TCPStore" in file.read_text()]


def test_a_member_that_waits_long_prints_nothing_about_its_idle_connection(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("_SERVER_OPTIONS", "_CHANNEL_OPTIONS"):  # ten times as fast
        hurried = [
            (key, value // 10 if key.endswith(("idle_ms", "idle_timeout_ms")) else value)
            for key, value in getattr(rendezvous, name)
        ]
        monkeypatch.setattr(rendezvous, name, tuple(hurried))
    with closing(RendezvousStore("127.0.0.1")) as store:
        store.begin(1, KEY)
        link = link_to(store)
        link.existing(["key"])
        time.sleep(7.0)  # the server closes after 3 to 6 s
        link.existing(["key"])  # a new connection
    assert "goaway" not in capfd.readouterr().err.lower()
