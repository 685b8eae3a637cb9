"""Where a process's metrics are, in a file that Prometheus' ``file_sd_configs`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["FOLDER", "forget_target", "forget_targets", "scrape_target", "target_text"]

FOLDER = "metrics_targets"


def target_text(address: str, labels: Mapping[str, str]) -> str:
    """The file's content.

    Args:
        address: host:port of the metrics.
        labels: that Prometheus puts on all of them.
    """
    return json.dumps([{"targets": [address], "labels": dict(labels)}]) + "\n"


def forget_targets(run_dir: Path) -> None:
    """A run begins: processes of an earlier one that were killed are down for good."""
    for file in (run_dir / FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def forget_target(run_dir: Path, name: str) -> None:
    """A process has left for good, as it was asked to: that it is down is nobody's concern."""
    with suppress(OSError):
        _file_of(run_dir, name).unlink()


@contextmanager
def scrape_target(
    run_dir: Path, name: str, address: str, labels: Mapping[str, str]
) -> Iterator[None]:
    """Notes where a process's metrics are, in ``<run_dir>/metrics_targets/<name>.json``.

    The file goes at an ordered end only, which a cancelled block is as well: of a process that was
    killed, or whose block ended with an error, Prometheus shall tell that it is down. Nothing
    happens where there is no such folder: a replica may run on a machine without it.
    """
    text = target_text(address, labels)
    file = _file_of(run_dir, name)
    with suppress(OSError):  # a full disk is told of by those who need it
        if run_dir.is_dir():
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
    has_failed = False
    try:
        yield
    except Exception:
        has_failed = True
        raise
    finally:
        if not has_failed:
            with suppress(OSError):
                if file.read_text(encoding="utf-8") == text:
                    file.unlink()


def _file_of(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name.replace('/', '_')}.json"
