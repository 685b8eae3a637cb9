"""Only the tables of names are generated; the text around them stays."""

from __future__ import annotations

import pytest

from tools.generate_metric_docs import with_tables

PAGE = """# Page

| name | not below a heading |

## One

Words.

| a | table |
|---|---|

| name | unit |
|---|---|
| `old` | s |

More words.

## Two
"""


def test_a_table_of_names_is_replaced_and_the_text_stays() -> None:
    page = with_tables(PAGE, [("One", "| name | unit |\n|---|---|\n| `new` | s |\n")])
    assert page == PAGE.replace("`old`", "`new`")


@pytest.mark.parametrize("heading", ["Two", "Three"])
def test_a_heading_without_a_table_is_an_error(heading: str) -> None:
    with pytest.raises(SystemExit, match=heading):
        with_tables(PAGE, [(heading, "| name |\n")])
