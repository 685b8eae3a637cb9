"""The newest lines of the services' logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.dashboard.run_data import log_names, log_tail


def write_log(run_dir: Path, service: str, text: str) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / f"{service}.log").write_text(text, encoding="utf-8")


def test_trainer_and_reward_service_come_before_the_replicas(tmp_path: Path) -> None:
    for service in ("rollout-0", "trainer", "reward", "trainer-1"):
        write_log(tmp_path, service, "x\n")
    (tmp_path / "logs" / "reward.stacks.txt").write_text("no log", encoding="utf-8")
    assert log_names(tmp_path) == ["trainer", "reward", "trainer-1", "rollout-0"]


def test_only_a_service_with_a_log_is_read(tmp_path: Path) -> None:
    write_log(tmp_path, "trainer", "one\n")
    (tmp_path / "secret.log").write_text("a secret\n", encoding="utf-8")
    for service in ("../secret", "", "nobody", "trainer.log", "/etc/passwd"):
        assert log_tail(tmp_path, service)["lines"] == []
    assert log_tail(tmp_path, "trainer")["lines"] == ["one"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    write_log(tmp_path, "trainer", "one\n")
    (tmp_path / "secret").write_text("a secret\n", encoding="utf-8")
    (tmp_path / "logs" / "linked.log").symlink_to(tmp_path / "secret")
    assert log_tail(tmp_path, "linked")["lines"] == []


def test_a_long_log_shows_its_newest_whole_lines(tmp_path: Path) -> None:
    write_log(tmp_path, "reward", "".join(f"line {n} {'x' * 100}\n" for n in range(5000)))
    found = log_tail(tmp_path, "reward")
    assert found["is_cut"]
    assert len(found["lines"]) == 400
    assert found["lines"][-1].startswith("line 4999 ")
    assert all(line.startswith("line ") for line in found["lines"])


@pytest.mark.parametrize("end", ["", "\n"])
def test_of_a_last_line_beyond_all_bounds_the_end_is_shown(tmp_path: Path, end: str) -> None:
    write_log(tmp_path, "reward", f"first\n{'x' * 300_000} the end{end}")
    (line,) = log_tail(tmp_path, "reward")["lines"]
    assert line.startswith("... xxx")
    assert line.endswith("x the end")


def test_bytes_that_are_no_text_are_no_error(tmp_path: Path) -> None:
    write_log(tmp_path, "reward", "")
    (tmp_path / "logs" / "reward.log").write_bytes(b"\xff\xfe\x00 bytes\n")
    assert len(log_tail(tmp_path, "reward")["lines"]) == 1


def test_a_run_without_logs_has_no_services(tmp_path: Path) -> None:
    assert log_tail(tmp_path, "trainer") == {
        "services": [],
        "service": "trainer",
        "lines": [],
        "is_cut": False,
    }
