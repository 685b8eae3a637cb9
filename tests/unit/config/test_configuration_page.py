"""docs/configuration.md is what the catalogue gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.catalogue.table import spellings
from sluice.config.explain import all_keys
from tools import generate_config_docs


def test_the_committed_page_is_current() -> None:
    assert generate_config_docs.PAGE.read_text(encoding="utf-8") == generate_config_docs.page()


def test_the_page_has_a_row_for_every_key_and_every_spelling() -> None:
    page = generate_config_docs.page()
    for name in [key.path for key in all_keys()] + list(spellings()):
        assert f"| `{name}` |" in page, name


def test_a_page_that_is_out_of_date_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "configuration.md"
    monkeypatch.setattr(generate_config_docs, "PAGE", stale)
    assert generate_config_docs.main(["--check"]) == 1
    assert generate_config_docs.main([]) == 0
    assert generate_config_docs.main(["--check"]) == 0
    stale.write_text(stale.read_text(encoding="utf-8").replace("honoured", "ignored"))
    assert generate_config_docs.main(["--check"]) == 1
