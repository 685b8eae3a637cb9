"""Log lines of one form for every service: time, level, service, message."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass

_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) +\S.*? (?P<logger>[\w.]+): (?P<message>.*)")


def configure_logging(service: str, level: str) -> None:
    """Send log lines to standard error, marked with the service's name."""
    marked = service.replace("%", "%%")
    form = f"%(asctime)s %(levelname)-7s {marked} %(name)s: %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class LogLine:
    """The parts of a line of `configure_logging`."""

    level: str
    logger: str
    message: str


def parse_line(line: str) -> LogLine | None:
    """Return the parts of a service's log line; ``None``: another program wrote it."""
    match = _LINE.fullmatch(line)
    return LogLine(**match.groupdict()) if match else None
