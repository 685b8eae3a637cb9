"""Log lines every service writes alike: time, level, service, message."""

from __future__ import annotations

import logging
import sys


def configure_logging(service: str, level: str) -> None:
    """Sends log lines to standard error, marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
