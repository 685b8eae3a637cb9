"""The exported page: complete in itself, and safe whatever the model wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import sluice.dashboard
from sluice.config.schema.trainer import TrainerConfig
from sluice.dashboard.serving import bundle, export_page, write_report
from sluice.errors import ConfigError
from sluice.report.summary import software_versions
from tests.support.dashboard_run import a_group, add_groups, make_run
from tests.support.run_folder import (
    ACCOUNTING,
    ACCOUNTS,
    VALIDATIONS,
    run_folder,
    write_examples,
)

STATIC = Path(next(iter(sluice.dashboard.__path__))) / "static"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "</pre></td><img src=x onerror=alert(2)>",
    "{{ 7 * 7 }} & \x00 \u2028 <!-- <script> <svg onload=alert(3)>",
)


class Page(HTMLParser):
    """The elements of an exported page, and the texts of its scripts and styles."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, str]] = []
        self.title = ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        match self.lasttag:
            case "script" | "style" if data.strip():
                self.inline.append((self.lasttag, data))
            case "title" if data.strip():
                self.title = data

    @property
    def answers(self) -> Any:
        (text,) = (text for tag, text in self.inline if tag == "script" and text[0] == "{")
        return json.loads(text)

    @property
    def policy(self) -> str:
        return next(str(a["content"]) for _, a in self.tags if a.get("http-equiv"))


def exported(folder: Path, **record: Any) -> Page:
    run_folder(folder, **record)
    file = folder / "report.html"
    export_page(folder, TrainerConfig(total_training_steps=2), file)
    return Page(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose name and responses are hostile, with files of an earlier run in its folder."""
    folder = tmp_path_factory.mktemp("runs") / "<b>run<"
    folder.mkdir()
    write_examples(folder, 0, "first words", *HOSTILE)
    write_examples(folder, 2, "last words", *HOSTILE)
    write_examples(folder, 60, "words of another run")
    add_groups(folder, [a_group(f"g{n}", step=n % 3, text=HOSTILE[0]) for n in range(40)])
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return exported(folder)


def test_the_page_holds_numbers_curves_and_responses_before_and_after(page: Page) -> None:
    overview = page.answers["/api/overview"]
    assert overview["health"] == "finished"
    assert overview["first_accuracy"] == {"step": 0, "value": 0.25}
    assert overview["accuracy"] == {"step": 2, "value": 0.75}
    assert (overview["step"], overview["training_seconds"]) == (2, 3.75)
    assert overview["prompts"]["submitted"] == 20
    curves = page.answers["/api/curves"]["curves"]
    assert curves["generated_tokens"] == {"x": [1, 2], "y": [1000.0, 1900.0]}
    assert curves["trained_tokens"]["y"] == [600.0, 1300.0]
    comparison = page.answers["/api/comparison"]
    assert (comparison["before"], comparison["after"]) == (0, 2)
    assert comparison["pairs"][0] == {
        "prompt": "p0",
        "ground_truth": "0",
        "before": {"text": "first words", "score": -1.0},
        "after": {"text": "last words", "score": -1.0},
    }


def test_the_page_holds_the_newest_groups_and_each_of_them_opens(page: Page) -> None:
    listed = page.answers["/api/samples?"]
    assert len(listed["groups"]) == 25
    assert (listed["num_matching"], listed["next"]) == (49, None)  # 9 of validations
    for group in listed["groups"]:
        assert page.answers[f"/api/samples/{group['id']}"]["responses"]


def test_the_page_shows_the_use_of_tokens_and_time(tmp_path: Path) -> None:
    page = exported(tmp_path, accounts={**ACCOUNTS, **ACCOUNTING})
    accounts = page.answers["/api/overview"]["accounts"]
    assert [account["title"] for account in accounts] == ["tokens", "trainer", "rollout"]


def test_the_page_holds_every_metric_and_the_configuration(page: Page) -> None:
    names = [one["name"] for one in page.answers["/api/metrics"]["metrics"]]
    assert {"critic/rewards/mean", "timing_s/step"} <= set(names)
    for name in names:
        assert page.answers[f"/api/metric?{urlencode({'name': name})}"]["name"] == name
    assert page.answers["/api/settings"] == {"settings": [], "versions": software_versions()}


def test_the_page_holds_the_runs_that_it_is_compared_with(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        run_folder(run)
    write_report(runs[0], tmp_path / "report.html", runs[1:])
    found = Page(tmp_path / "report.html").answers
    assert [run["name"] for run in found["/api/runs"]["runs"]] == ["one", "two"]
    assert len(found["/api/metric?name=timing_s%2Fstep"]["runs"]) == 2
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        write_report(runs[0], tmp_path / "report.html", [tmp_path])


def test_hostile_text_stays_data(page: Page) -> None:
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 3
    assert "img" not in names
    assert not [name for _, attributes in page.tags for name in attributes if name[:2] == "on"]
    texts = [pair["after"]["text"] for pair in page.answers["/api/comparison"]["pairs"]]
    assert texts == ["last words", *HOSTILE]
    assert page.title == "<b>run<"


def test_the_page_needs_nothing_from_outside_and_runs_no_other_script(page: Page) -> None:
    links = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in {"src", "href", "action"} and value
    ]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"@import|url\(", page.text)
    assert page.policy.startswith("default-src 'none';")
    allowed = set(re.findall(r"'sha256-([^']+)'", page.policy))
    run = [text for _, text in page.inline if text[0] != "{"]
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run}
    assert allowed == digests
    assert len(digests) == 3  # a style, uPlot, and the page's modules
    assert "MIT License" in page.text


def test_responses_that_an_earlier_run_left_are_not_compared(page: Page) -> None:
    assert "words of another run" not in json.dumps(page.answers["/api/comparison"])


def test_the_same_run_gives_the_same_bytes(page: Page, folder: Path) -> None:
    assert exported(folder).text == page.text


def test_a_run_without_steps_and_with_one_validation_has_a_page_too(tmp_path: Path) -> None:
    write_examples(tmp_path, 0, "only")
    page = exported(tmp_path, steps=(), validations=VALIDATIONS[:1])
    assert page.answers["/api/comparison"]["pairs"] == []
    assert page.answers["/api/overview"]["step"] == 0


def test_the_report_of_a_started_run_reads_the_folders_of_its_configuration(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    row = {"input": "a problem", "output": "7", "step": 1, "score": 1.0}
    (dumps / "1.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    run = make_run(tmp_path / "run", f"trainer.validation_data_dir={dumps}")
    write_report(run, run / "report.html")
    (group,) = Page(run / "report.html").answers["/api/samples?"]["groups"]
    assert group["excerpt"] == "a problem"


def test_the_script_of_an_exported_page_holds_every_module_of_the_live_page() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in STATIC.glob("*.js")}
    script = bundle(texts)
    assert not re.search(r"^(?:import|export)\b", script, re.MULTILINE)
    modules = set(re.findall(r"^const module_(\w+) = \(\(\) =>", script, re.MULTILINE))
    assert {f"{name}.js" for name in modules} == set(texts) - {"uPlot.iife.min.js"}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_of_an_exported_page_is_a_valid_classic_script(tmp_path: Path) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in STATIC.glob("*.js")}
    (tmp_path / "script.cjs").write_text(bundle(texts), encoding="utf-8")
    subprocess.run(["node", "--check", "script.cjs"], cwd=tmp_path, check=True, timeout=60)


def test_the_vendored_library_names_its_version_and_comes_with_its_licence() -> None:
    library = (STATIC / "uPlot.iife.min.js").read_text(encoding="utf-8")
    licence = (STATIC / "uPlot.LICENSE.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"uPlot \(v([\d.]+)\)", library)
    assert licence.startswith(f"uPlot {version} ")
    assert "The MIT License" in licence


def test_somebody_who_reads_a_page_while_it_is_replaced_reads_the_former_one(
    tmp_path: Path,
) -> None:
    run_folder(tmp_path)
    file, former = tmp_path / "report.html", tmp_path / "former.html"
    file.write_text("former")
    former.hardlink_to(file)
    export_page(tmp_path, TrainerConfig(total_training_steps=2), file)
    assert former.read_text() == "former"
    assert Page(file).title == tmp_path.name
