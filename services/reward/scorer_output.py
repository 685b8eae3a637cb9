"""What scorers print: to the log, but only so much of it.

A scorer that prints without end would fill the disk that holds the log. Its standard output and
error become a pipe, whose reader passes on the first bytes of every request and drops the rest.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT, _STDERR = 1, 2
_CHUNK_BYTES = 1 << 16


class OutputLimit:
    """Passes on at most `max_bytes` per request. Made by `limited_output`.

    Args:
        source: file descriptor that is read.
        sink: file descriptor that is written.
        max_bytes: per request.
    """

    def __init__(self, source: int, sink: int, max_bytes: int) -> None:
        self._source, self._sink, self._max_bytes = source, sink, max_bytes
        self._num_left = max_bytes

    def begin_request(self) -> None:
        """Allow as much again."""
        self._num_left = self._max_bytes

    def pass_on(self) -> None:
        """Read until all writers are gone."""
        while chunk := os.read(self._source, _CHUNK_BYTES):
            allowed = chunk[: self._num_left]
            if allowed and len(allowed) < len(chunk):
                allowed += b"\n[the scorer prints more; it is dropped until the next request]\n"
            self._num_left -= min(len(chunk), self._num_left)
            _write(self._sink, allowed)


@contextmanager
def limited_output(max_bytes: int) -> Iterator[OutputLimit]:
    """Limit standard output and error of this process while the block runs.

    What the interpreter says about a fatal signal goes to the log directly.
    """
    sink = os.dup(_STDERR)
    faulthandler.enable(sink)
    source, entrance = os.pipe()
    os.dup2(entrance, _STDOUT)
    os.dup2(entrance, _STDERR)
    os.close(entrance)
    limit = OutputLimit(source, sink, max_bytes)
    threading.Thread(target=limit.pass_on, name="scorer-output", daemon=True).start()
    try:
        yield limit
    finally:
        os.dup2(sink, _STDOUT)
        os.dup2(sink, _STDERR)


def _write(sink: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(sink, remaining) :]
