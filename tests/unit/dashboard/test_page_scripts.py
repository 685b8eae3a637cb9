"""Colours, escapes and axes of the page, checked with its own scripts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import sluice.dashboard

STATIC = Path(next(iter(sluice.dashboard.__path__))) / "static"
STYLE = (STATIC / "dashboard.css").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
WARNINGS = {"orange", "red"}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for script in STATIC.glob("*.js"):
        shutil.copy(script, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def value(scripts: Path, module: str, expression: str) -> Any:
    """Evaluate an expression over the exports of a module, as `m`."""
    code = f'import * as m from "./{module}"; console.log(JSON.stringify({expression}));'
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", code],
        cwd=scripts,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(ran.stdout)


def test_a_meaning_has_one_colour_and_what_is_trained_never_that_of_a_warning(
    scripts: Path,
) -> None:
    names = ["kept", "trained", "all_right", "filtered_all_right", "filtered all right", "stale"]
    names += ["dropped_stale", "failed", "tokens of a new kind"]
    styles = dict(zip(names, value(scripts, "colours.js", f"{names}.map(m.styleOf)"), strict=True))
    assert styles["kept"] == styles["trained"] == "green"
    assert styles["all_right"] == styles["filtered_all_right"] == styles["filtered all right"]
    assert styles["all_right"] not in WARNINGS | {"green"}
    assert styles["stale"] == styles["dropped_stale"]
    assert {styles["stale"], styles["failed"]} == WARNINGS
    assert styles["tokens of a new kind"] == "grey"


def test_every_colour_that_a_script_names_is_defined(scripts: Path) -> None:
    named = set(value(scripts, "colours.js", "m.RUN_STYLES.map((s) => s.split(' ')[0])"))
    assert len(named) == len(value(scripts, "colours.js", "m.RUN_STYLES"))
    for name in named:
        assert f"--{name}:" in STYLE
        assert f".{name} {{ --series: var(--{name}); }}" in STYLE


def test_a_log_line_shows_what_a_terminal_would_obey_as_escapes(scripts: Path) -> None:
    line = "\x1b[31mred\u202e txt\u0007\ttab <b>"
    assert value(scripts, "number_text.js", f"m.visible({json.dumps(line)})") == (
        "\\u{1b}[31mred\\u{202e} txt\\u{7}\ttab <b>"
    )


def test_small_numbers_keep_their_digits_on_an_axis(scripts: Path) -> None:
    numbers = "[1e-6, 2.5e-4, 0.001, 0, 1234, 66506, -3.5e-5].map(m.short)"
    assert value(scripts, "number_text.js", numbers) == [
        "1e−6", "2.5e−4", "0.001", "0", "1230", "66.5k", "-3.5e−5",
    ]  # fmt: skip


_NODES = """
const nodes = new Map();
globalThis.document = { getElementById(id) {
  if (id === "run-answers") return null; // an exported page has this
  if (!nodes.has(id)) {
    nodes.set(id, { textContent: "", parentElement: {}, dataset: {}, replaceChildren() {} });
  }
  return nodes.get(id);
} };
const m = await import("./status.js");
const run = {
  name: "run", health: HEALTH, reasons: [], phase: HEALTH, phase_seconds: 0.2, step: 20,
  total_steps: 20, training_seconds: 70, accuracy: null, reward: null, tokens_per_s: null,
  tokens_per_s_now: null, wait: null, awaited: [],
};
m.showStatus(run);
const wait = nodes.get("fact-wait");
console.log(JSON.stringify([nodes.get("fact-phase").textContent, wait.parentElement.hidden]));
"""


@pytest.mark.parametrize(
    ("health", "phase", "hides_the_wait"),
    [
        ("finished", "finished", True),
        ("not running", "not running", True),
        ("healthy", "healthy, for 0 s", False),
    ],
)
def test_a_run_that_is_over_shows_no_duration_and_no_wait(
    scripts: Path, health: str, phase: str, *, hides_the_wait: bool
) -> None:
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", _NODES.replace("HEALTH", json.dumps(health))],
        cwd=scripts,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ran.stdout) == [phase, hides_the_wait]
