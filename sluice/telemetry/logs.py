"""Log lines of one form for every service: time, level, service, message."""

from __future__ import annotations

import logging
import sys


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
