"""Serve an environment by hand: `python -m sluice.environment --file FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from sluice.concurrency.process import exit_status, stop_on_signals
from sluice.config.addresses import bare_host, split_host_port
from sluice.environment.servicer import served_environment
from sluice.environment.source import EnvironmentSource
from sluice.rpc.credentials import OPEN
from sluice.telemetry.logs import configure_logging

NAME = "environment"
logger = logging.getLogger(__name__)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sluice.environment",
        description="Serves the environment of a file to runs with sluice.environment.addresses.",
        epilog="example: python -m sluice.environment --file game.py --address 127.0.0.1:7700",
    )
    parser.add_argument("--file", required=True, help="Python file with a class or function")
    parser.add_argument("--name", help="which one; default: the only one that is public")
    parser.add_argument(
        "--address", default="127.0.0.1:7700", help="host:port to listen on; port 0: any"
    )
    return parser.parse_args(argv)


async def _serve(source: EnvironmentSource, address: str) -> None:
    stop = asyncio.Event()
    host, port = split_host_port(address)
    with stop_on_signals(stop):
        async with served_environment(
            source.load(), bare_host(host), int(port or 0), credentials=OPEN
        ) as served:
            logger.info("serving %s at %s", source.path, served)
            await stop.wait()


def main() -> int:
    """Run until SIGTERM or SIGINT; exit code 0 when everything ended in order."""
    arguments = _parse(sys.argv[1:])
    configure_logging(NAME, "INFO")
    source = EnvironmentSource(arguments.file, arguments.name)
    return exit_status(NAME, lambda: asyncio.run(_serve(source, arguments.address)))


if __name__ == "__main__":
    sys.exit(main())
