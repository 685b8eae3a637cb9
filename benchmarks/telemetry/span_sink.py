"""A collector that counts spans' bytes and keeps nothing; its CPU is not the run's.

Prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from benchmarks.reporting import ROOT

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
    """Run a collector in a process of its own; yield its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.telemetry.span_sink"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sink:
        assert sink.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(sink.stdout.readline())}"
        finally:
            sink.kill()


def main() -> None:
    """Serve until the input ends."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2), handlers=[_Sink()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main()
