"""Log lines that every service writes alike."""

from __future__ import annotations

import logging
import re

import pytest

from sluice.telemetry.logs import configure_logging


@pytest.mark.parametrize("name", ["rollout-0", "100%s"])
def test_a_line_holds_time_level_service_and_logger(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(name, "INFO")
    logging.getLogger("a.b").warning("%d left", 3)
    line = capsys.readouterr().err
    assert re.fullmatch(rf"\d\d:\d\d:\d\d WARNING {re.escape(name)} a\.b: 3 left\n", line)


def test_lines_below_the_level_are_left_out_and_configuring_twice_repeats_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("x", "INFO")
    configure_logging("x", "WARNING")
    logging.getLogger("a").info("quiet")
    logging.getLogger("a").error("loud")
    assert capsys.readouterr().err.count("\n") == 1
