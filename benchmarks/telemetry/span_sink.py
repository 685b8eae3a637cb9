"""A collector of spans that keeps nothing. Its CPU is not the run's, nor the sending thread's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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


@contextmanager
def span_sink() -> Iterator[str]:
    """Run a collector; yield its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2), handlers=[_Sink()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
