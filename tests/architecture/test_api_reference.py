"""docs/reference/protos.md is what proto/ gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import generate_api_reference
from tools.generate_api_reference import descriptors


def test_the_committed_reference_is_current() -> None:
    committed = generate_api_reference.PAGE.read_text(encoding="utf-8")
    assert committed == generate_api_reference.page(), (
        "run python -m tools.generate_api_reference and commit docs/reference/protos.md"
    )


def test_the_reference_has_every_call_message_field_and_value_with_its_meaning() -> None:
    page = generate_api_reference.page()
    for file in descriptors():
        short = file.package.removeprefix("sluice.api.")
        for name in [one.name for one in (*file.service, *file.message_type, *file.enum_type)]:
            assert f"### {short}.{name}\n" in page
        for method in (method for service in file.service for method in service.method):
            assert f"| `{method.name}` |" in page
        for field in (field for message in file.message_type for field in message.field):
            assert f" | `{field.name}` | " in page
    assert "|  |\n" not in page, "something has no comment"


def test_a_reference_that_is_out_of_date_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "reference" / "protos.md"
    monkeypatch.setattr(generate_api_reference, "PAGE", stale)
    assert generate_api_reference.main(["--check"]) == 1
    assert generate_api_reference.main([]) == 0
    assert generate_api_reference.main(["--check"]) == 0
    stale.write_text(stale.read_text(encoding="utf-8").replace("Samples", "Draws"))
    assert generate_api_reference.main(["--check"]) == 1
