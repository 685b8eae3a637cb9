"""`sluice logs`: show the log lines of a run's services."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import AsJsonLines, RunArgument, RunOption, named_run
from sluice.cli.terminal import print_json
from sluice.dashboard.line_tail import LineTail
from sluice.errors import ConfigError
from sluice.safe_text import printable
from sluice.service_contract import CONFIG_NAME

_POLL_S = 0.3
_SUFFIX = ".log"


def logs(
    run: RunArgument = None,
    service: Annotated[
        str | None,
        typer.Argument(
            metavar="SERVICE",
            help="trainer, reward, rollout-0 or another; none: all.",
            show_default=False,
        ),
    ] = None,
    *,
    run_option: RunOption = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Also print new lines, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("-n", min=0, help="Last lines of each service; none: all.")
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of a run's services.

    The files are RUN/logs/SERVICE.log. A service alone is one of the newest run's; it may also
    come before the run.

    \b
    Examples:
      sluice logs runs/quickstart
      sluice logs trainer -f -n 20
    """
    if run is not None and _is_service_name(run):
        run, service = _run_and_service(run, service)
    run_path = named_run(run, run_option)
    folder = (run_path.parent if run_path.is_file() else run_path) / "logs"
    show = partial(_print, has_name=service is None, as_json=as_json)
    tails = {file: LineTail(file) for file in _files(folder, service)}
    for file, tail in tails.items():
        show(file, deque(_read_new_lines(tail), maxlen=lines))
    while follow:
        time.sleep(_POLL_S)
        for file in _files(folder, service):
            show(file, _read_new_lines(tails.setdefault(file, LineTail(file))))


def _run_and_service(first: Path, second: str | None) -> tuple[Path | None, str]:
    """Return the run and the service of two arguments; the first is no run."""
    if second is not None and not _is_path(second):
        raise ConfigError(
            f"run: there is no folder {first}, and none {second}; give the folder of a run, such "
            f"as runs/quickstart, or the service alone, which is one of the newest run's"
        )
    return None if second is None else Path(second), str(first)


def _is_service_name(path: Path) -> bool:
    return len(path.parts) == 1 and not (path / CONFIG_NAME).is_file() and not path.exists()


def _is_path(text: str) -> bool:
    return len(Path(text).parts) > 1 or Path(text).exists()


def _print(file: Path, lines: deque[str] | Iterator[str], *, has_name: bool, as_json: bool) -> None:
    """Print lines; `has_name`: with the name of their service."""
    name = file.name.removesuffix(_SUFFIX)
    for line in lines:
        if as_json:
            print_json({"service": name, "line": line})
        else:
            typer.echo(printable(f"{name} | {line}" if has_name else line))


def _files(folder: Path, service: str | None) -> list[Path]:
    """Return the log files. Raise ConfigError without any, or if the service has none."""
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if not files:
        from sluice.client.run_address import refuse_missing  # gRPC, which only this needs

        refuse_missing(folder.parent)
        raise ConfigError(f"run: {folder} holds no logs; give the folder of a started run")
    if service is not None:
        service_files = [file for file in files if file.name == f"{service}{_SUFFIX}"]
        if not service_files:
            names = ", ".join(file.name.removesuffix(_SUFFIX) for file in files)
            raise ConfigError(f"service: {folder.parent} has no log of {service!r}; it has {names}")
        return service_files
    return files


def _read_new_lines(tail: LineTail) -> Iterator[str]:
    has_more = True
    while has_more:
        new_lines = tail.read_new_lines()
        has_more = new_lines.has_more
        for line in new_lines.lines:
            yield line.text.decode("utf-8", errors="replace").rstrip("\r\n")
