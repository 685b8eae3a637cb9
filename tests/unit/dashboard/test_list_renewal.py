"""When the list of samples is asked for again, checked with the page's own script."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import sluice.dashboard

STATIC = Path(next(iter(sluice.dashboard.__path__))) / "static"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

# A page with one form, a server with given answers, and a list of the requests to it.
_PAGE = """
const form = {};
const asked = [];
let answer = { status: 200, body: { groups: [], next: null, counts: {}, num_matching: 0 } };
const nodes = new Map();
function node() {
  const listeners = {};
  return {
    hidden: true, textContent: "", listeners, tBodies: [{ replaceChildren() {} }],
    append() {}, replaceChildren() {}, setAttribute() {},
    querySelectorAll: () => [], querySelector: () => null,
    addEventListener(name, listener) { listeners[name] = listener; },
  };
}
globalThis.Node = class {};
globalThis.document = {
  createElement: node, createElementNS: node, createTextNode: node,
  getElementById(id) {
    if (id === "run-answers") return null; // an exported page has this
    if (!nodes.has(id)) nodes.set(id, node());
    return nodes.get(id);
  },
};
globalThis.FormData = class {
  get(name) { return form[name] ?? null; }
  getAll(name) { return form[name] ?? []; }
};
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async (path) => {
  asked.push(path);
  const given = answer;
  if (given.until) await given.until;
  return {
    status: given.status, ok: given.status < 400, headers: { get: () => null },
    json: async () => given.body,
  };
};
const settle = () => new Promise((done) => setTimeout(done, 20));
const { renewEmptyList, startSamples } = await import("./samples.js");
startSamples(() => {});
const submit = async () => {
  document.getElementById("sample-filter").listeners.submit({ preventDefault() {} });
  await settle();
};
const empty = (next) => ({ groups: [], next, counts: { trained: 9 }, num_matching: 9 });
"""


def asked(tmp_path: Path, steps: str) -> list[dict[str, list[str]]]:
    """Return the queries of all requests after these steps, in order."""
    for script in STATIC.glob("*.js"):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    report = "console.log(JSON.stringify(asked));\n"
    (tmp_path / "page.js").write_text(f"{_PAGE}{steps}\n{report}", encoding="utf-8")
    ran = subprocess.run(
        ["node", "page.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [parse_qs(urlsplit(path).query) for path in json.loads(ran.stdout)]


def test_an_empty_list_is_asked_for_again_with_what_was_submitted(tmp_path: Path) -> None:
    steps = """
    form.first_step = "3"; await submit();
    form.first_step = "37"; form.text = "half typ";
    await renewEmptyList(); await renewEmptyList();
    """
    assert asked(tmp_path, steps) == [{"first_step": ["3"]}] * 3


def test_a_search_that_has_found_nothing_yet_is_left_alone(tmp_path: Path) -> None:
    steps = """
    answer = { status: 200, body: empty("1-2") };
    form.text = "needle"; await submit();
    await renewEmptyList();
    answer = { status: 200, body: empty(null) };
    document.getElementById("sample-more").listeners.click(); await settle();
    await renewEmptyList();
    """
    assert asked(tmp_path, steps) == [
        {"text": ["needle"]},
        {"text": ["needle"], "after": ["1-2"]},
    ]


def test_a_question_under_way_is_not_asked_twice(tmp_path: Path) -> None:
    steps = """
    let free;
    answer = { ...answer, until: new Promise((done) => { free = done; }) };
    await submit();
    await renewEmptyList();
    free(); await settle();
    """
    assert asked(tmp_path, steps) == [{}]


def test_a_refused_value_is_sent_once_and_its_error_is_shown(tmp_path: Path) -> None:
    steps = """
    const taken = answer;
    answer = { status: 400, body: { error: { message: "first_step: no number" } } };
    form.first_step = "x"; await submit();
    await renewEmptyList();
    const said = document.getElementById("sample-count").textContent;
    if (said !== "first_step: no number") throw new Error(said);
    answer = taken; form.first_step = "1"; await submit();
    await renewEmptyList();
    """
    first, *rest = asked(tmp_path, steps)
    assert first == {"first_step": ["x"]}
    assert rest == [{"first_step": ["1"]}] * 2
