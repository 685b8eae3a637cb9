"""docs/reference/protos.md has everything that proto/ has; a static check compares its text."""

from __future__ import annotations

from tools import generate_api_reference
from tools.generate_api_reference import descriptors


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
