"""Rank 0's call to leave an epoch, which it does not wait for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.trainer.learner.sending_ranks import SendingRankClient
from sluice.api.weights.v1 import weights_pb2 as messages
from sluice.api.weights.v1 import weights_pb2_grpc as services
from sluice.weights.rendezvous import bind, member_server

_EPOCHS = 40
_WITHIN_S = 20.0


class _Rank(services.SendingRankServiceServicer):
    def __init__(self) -> None:
        self.left: set[int] = set()
        self.all_left = threading.Event()

    def LeaveGroups(
        self, request: messages.LeaveGroupsRequest, context: grpc.ServicerContext
    ) -> messages.LeaveGroupsResponse:
        self.left.add(request.epoch)
        if len(self.left) == _EPOCHS:
            self.all_left.set()
        return messages.LeaveGroupsResponse()


def test_every_call_to_leave_an_epoch_arrives() -> None:
    rank = _Rank()
    with ThreadPoolExecutor(1) as threads:
        server = member_server(threads, lambda _: True)
        services.add_SendingRankServiceServicer_to_server(rank, server)
        port = bind(server, "127.0.0.1", 0, None)
        server.start()
        client = SendingRankClient(1, "127.0.0.1", port, b"key")
        for epoch in range(_EPOCHS):
            client.leave(epoch, "a worker is lost")
        arrived = rank.all_left.wait(_WITHIN_S)
        client.close()
        server.stop(None).wait()
    assert arrived, f"{len(rank.left)} of {_EPOCHS}"
