"""What the trial of the how-tos does with a command that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.first_hour.howtos import tried_pages


def test_a_command_that_hangs_is_a_problem_of_its_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.first_hour.howtos._WITHIN_S", 1.0)
    pages, user = tmp_path / "pages", tmp_path / "user"
    for folder in (pages, user):
        folder.mkdir()
    texts = {
        "fails": "$ echo printed; false\n",
        "hangs": "$ echo printed; exec sleep 600\n$ touch reached\n",
        "works": "$ true\n$ false  # exit code 1\n",
    }
    for name, text in texts.items():
        (pages / f"{name}.md").write_text(f"```console\n{text}```\n")
    found = tried_pages(pages, user, None)
    assert found["fails"].endswith("\nprinted\n\nexit code 1")
    assert "printed\n\nno end within 1 s" in found["hangs"]
    assert found["works"] == ""
    assert not (user / "reached").exists()
