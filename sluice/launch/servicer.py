"""LaunchService: decode, call, encode, return; and where it listens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from sluice.api.launch.v1 import launch_pb2 as launch
from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.launch.launcher_address import (
    LAUNCHER_NAME,
    LauncherAddress,
    new_secret,
    write_launcher,
)
from sluice.launch.replica_scale import Processes, ReplicaScale
from sluice.launch.service_spec import replica_name
from sluice.rpc.server import RpcServer

Context = grpc.aio.ServicerContext[Any, Any]

_SERVICE = "sluice.api.launch.v1.LaunchService"
_HOST = "127.0.0.1"
_MAX_MESSAGE_BYTES = 1 << 20
_LAST_ANSWERS_S = 1.0


class LaunchServicer(launch_pb2_grpc.LaunchServiceServicer):
    """The launcher's calls.

    Args:
        processes: of the run.
        scale: changes the number of replicas.
    """

    def __init__(self, processes: Processes, scale: ReplicaScale) -> None:
        self._processes, self._scale = processes, scale

    async def SetReplicas(
        self, request: launch.SetReplicasRequest, context: Context
    ) -> launch.SetReplicasResponse:
        """Starts or drains replicas."""
        change = self._scale.set(request.replicas)
        return launch.SetReplicasResponse(
            started=map(replica_name, change.start), drained=map(replica_name, change.drain)
        )

    async def GetServices(
        self, request: launch.GetServicesRequest, context: Context
    ) -> launch.GetServicesResponse:
        """All processes."""
        return launch.GetServicesResponse(
            services=[
                launch.ServiceProcess(
                    name=state.name,
                    pid=state.pid,
                    restarts=state.restarts,
                    draining=state.is_draining,
                )
                for state in self._processes.services()
            ]
        )


@asynccontextmanager
async def launch_service(
    run_dir: Path, processes: Processes, scale: ReplicaScale
) -> AsyncIterator[LauncherAddress]:
    """Serves on a free port of the loopback interface while the block runs; gives the address.

    The address stands in the run's folder meanwhile, with a secret that is drawn anew at each
    start. Whoever bears it may call the launcher, and nothing else; no token of the run is asked
    for, so that none comes here.

    Args:
        run_dir: the run's folder.
        processes: of the run.
        scale: changes the number of replicas.
    """
    secret = new_secret()
    servicer = LaunchServicer(processes, scale)
    server = RpcServer(
        [lambda server: launch_pb2_grpc.add_LaunchServiceServicer_to_server(servicer, server)],
        (_SERVICE,),
        host=_HOST,
        port=0,
        max_message_bytes=_MAX_MESSAGE_BYTES,
        credentials=LauncherAddress("", secret).credentials,
    )
    await server.start()
    launcher = LauncherAddress(server.address, secret)
    write_launcher(run_dir, launcher)
    try:
        yield launcher
    finally:
        (run_dir / LAUNCHER_NAME).unlink(missing_ok=True)
        await server.stop(_LAST_ANSWERS_S)
