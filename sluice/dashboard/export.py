"""The page of a run as one file, with the run's data inside: it needs no server and no network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from sluice.config.schema.trainer import TrainerConfig
from sluice.dashboard.page import USUAL_GROUPS, USUAL_POINTS, policy_source
from sluice.dashboard.run_data import RunData
from sluice.dashboard.sample_browser import SampleFilter
from sluice.whole_file import write_whole

_MAIN = "main.js"
_METRIC_POINTS = 120  # of each of some hundred metrics
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)


def export_page(
    run_dir: Path, trainer: TrainerConfig, file: Path, others: Sequence[Path] = ()
) -> None:
    """Write the page with all numbers of the run and its newest groups.

    The same folder gives the same bytes.

    Args:
        run_dir: the run's folder.
        trainer: of its configuration.
        file: the file to write; others see the former one or the new one.
        others: folders of runs to show beside it.

    Raises:
        OSError: a file cannot be read or written.
    """
    data = RunData(run_dir, trainer, others=others)
    while data.read():
        pass
    samples = data.samples(SampleFilter(), "", None, USUAL_GROUPS)
    metrics = data.metrics()
    answers = {
        "/api/overview": data.overview(None),
        "/api/curves": data.curves(USUAL_POINTS),
        "/api/comparison": data.comparison(),
        "/api/settings": data.settings(),
        "/api/runs": data.runs(_METRIC_POINTS),
        "/api/metrics": metrics,
        **{
            f"/api/metric?{urlencode({'name': one['name']})}": data.metric(
                one["name"], _METRIC_POINTS
            )
            for one in metrics["metrics"]
        },
        "/api/samples?": {**samples, "next": None},  # the file holds no further groups
        **{f"/api/samples/{one['id']}": data.group(one["id"]) for one in samples["groups"]},
    }
    write_whole(file, _page(run_dir.absolute().name, answers).encode())


def _page(name: str, answers: dict[str, Any]) -> str:
    """Return the page with its styles, its scripts and `answers` inside."""
    static = files("sluice.dashboard") / "static"
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in static.iterdir()
        if not entry.name.endswith(".svg")
    }
    style = texts["uPlot.min.css"] + "\n" + texts["dashboard.css"]
    library, script = texts["uPlot.iife.min.js"], bundle(texts)
    policy = (
        f"default-src 'none'; style-src {policy_source(style)}; "
        f"script-src {policy_source(library)} {policy_source(script)}; "
        "base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # In JSON, "<" occurs within texts only. Escaped, no text can end the element.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<!--\n{texts['uPlot.LICENSE.txt']}\n-->\n<style>{style}</style>\n"
    )
    body = (
        f'<script type="application/json" id="run-answers">{data}</script>\n'
        f"<script>{library}</script>\n<script>{script}</script>\n"
    )
    page = re.sub(r"<(?:link|script) [^>]*>(?:</script>)?\n", "", texts["index.html"])
    page = page.replace("<title>sluice</title>\n", f"<title>{html.escape(name)}</title>\n{head}")
    return page.replace("</body>", f"{body}</body>")


def bundle(texts: dict[str, str]) -> str:
    """Return the modules as one script, each as a function that returns what it exports.

    A file that is opened without a server cannot import modules from other files.

    Args:
        texts: the page's files by name.
    """
    parts: list[str] = []
    done: set[str] = set()

    def add(name: str) -> None:
        if name in done:
            return
        done.add(name)
        for _, source in _IMPORT.findall(texts[name]):
            add(source)
        exported = ", ".join(_EXPORT.findall(texts[name]))
        body = _IMPORT.sub(lambda m: f"const {m[1]} = {_variable(m[2])};\n", texts[name])
        body = _EXPORT.sub("", body)
        parts.append(
            f"const {_variable(name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"
        )

    add(_MAIN)
    return '"use strict";\n' + "".join(parts)


def _variable(file_name: str) -> str:
    return f"module_{file_name.removesuffix('.js')}"
