"""A collector that counts spans' bytes and keeps nothing; its CPU is not the run's.

Prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class _Sink(grpc.GenericRpcHandler):
    """Takes every export as bytes, and answers with an empty message."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if handler_call_details.method != _METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")


def main() -> None:
    """Serves."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2), handlers=[_Sink()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main()
