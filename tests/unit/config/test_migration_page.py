"""docs/migrating-from-verl.md against reality: its launch, its output, its lists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.rollout.engines.registry import ENGINES
from sluice.cli.main import commands
from sluice.config.catalogue.table import KeyStatus
from sluice.config.explain import explain_key
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from tests.support.documents import blocks, table_rows
from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "migrating-from-verl.md"
ALGORITHMS = ROOT / "docs" / "algorithms.md"
OUTSIDE = {"not applicable": KeyStatus.NOT_APPLICABLE, "refused": KeyStatus.REFUSED}
NAMES = re.compile(r"`([a-z0-9_]+)`")


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    file = tmp_path / "launch.overrides"
    file.write_text(blocks(PAGE, "properties")[0], encoding="utf-8")
    return file


def checked(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["config", "check", *arguments, "--no-files"])
    return result.exit_code, " ".join(result.output.split())


def quoted_lines(command: str) -> list[str]:
    """The lines of output that the page shows below a command, up to where it cuts them."""
    body = next(b for b in blocks(PAGE, "console") if command in b)
    shown = body.split(command, 1)[1].split("\n$ ")[0].splitlines()[1:]
    return [" ".join(line.removesuffix("...").split()) for line in shown if line != "..."]


def test_the_launch_of_the_page_is_accepted(launch: Path) -> None:
    code, output = checked(str(launch))
    assert code == 0, output
    assert "No problems found." in output


@pytest.mark.parametrize(
    "command",
    [
        "sluice config check launch.overrides --no-files",
        "sluice config check launch.overrides sluice.asynchrony.max_staleness=1 "
        "algorithm.rollout_correction.rollout_is=null --no-files",
    ],
)
def test_the_output_of_the_page_is_printed(launch: Path, command: str) -> None:
    words = command.removesuffix(" --no-files").split()[4:]
    _, output = checked(str(launch), *words)
    quoted = quoted_lines(command)
    assert quoted
    for line in quoted:
        assert line in output


def test_every_key_of_the_list_of_what_does_not_work_has_the_status_it_says() -> None:
    rows = table_rows(PAGE, "## What does not work")
    assert len(rows) > 10
    for setting, named, _ in rows:
        key = setting.strip("`")
        if "=" in key:
            assert OUTSIDE[named] is KeyStatus.REFUSED
            assert refused(key), setting
        else:
            assert explain_key(key).status is OUTSIDE[named], setting


def test_the_engines_that_the_page_calls_missing_are_missing() -> None:
    rows = [row for row in table_rows(PAGE, "## What does not work") if "rollout.name=" in row[0]]
    missing = {row[0].strip("`").partition("=")[2] for row in rows}
    assert missing
    assert not missing & set(ENGINES), "an engine has landed: take it out of the list"


def refused(*overrides: str) -> bool:
    try:
        load_config(None, list(overrides))
    except ConfigError:
        return True
    return checked(*overrides)[0] == 1


BASE = (
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.rollout.n=4",
)
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
USES_ENGINE = "actor_rollout_ref.actor.use_rollout_log_probs=true"


@pytest.mark.parametrize(
    "overrides",
    [
        ("sluice.asynchrony.max_staleness=1", f"{CORRECTION}.rollout_is=null"),
        (f"{CORRECTION}.rollout_is=token", USES_ENGINE),
        ("algorithm.adv_estimator=adpo", f"{LOSS}=vanilla"),
        ("algorithm.adv_estimator=grpo", f"{LOSS}=adpo"),
        ("algorithm.adv_estimator=adpo", f"{LOSS}=adpo", f"{CORRECTION}.bypass_mode=true"),
        ("algorithm.adv_estimator=gae", "critic.enable=false"),
        ("algorithm.adv_estimator=gdpo",),
        (f"{LOSS}=dro",),
        ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=grpo_passk"),
        ("actor_rollout_ref.rollout.n=1", "algorithm.filter_groups.enable=true"),
        (f"{LOSS}=gspo", f"{CORRECTION}.bypass_mode=true"),
        ("sluice.asynchrony.max_staleness=1", f"{LOSS}=gpg", USES_ENGINE),
        ("sluice.asynchrony.max_staleness=1", f"{LOSS}=adpo", f"{CORRECTION}.rollout_is=token"),
        (
            f"{CORRECTION}.rollout_rs=seq_mean_k3",
            f"{CORRECTION}.rollout_rs_threshold=2",
            USES_ENGINE,
        ),
        (f"{CORRECTION}.rollout_rs_threshold=2.0",),
        ("actor_rollout_ref.actor.kl_loss_type=full",),
    ],
)
def test_what_the_page_of_algorithms_calls_refused_is(overrides: tuple[str, ...]) -> None:
    assert not refused(*BASE)
    assert refused(*BASE, *overrides)


@pytest.mark.parametrize(
    ("heading", "registry"),
    [
        ("## Advantages", "sluice.algorithm.registry:BATCH_ESTIMATORS"),
        ("## Policy losses", "sluice.algorithm.registry:POLICY_OBJECTIVES"),
    ],
)
def test_the_page_of_algorithms_has_a_row_for_every_name(heading: str, registry: str) -> None:
    module, _, attribute = registry.partition(":")
    known = set(getattr(importlib.import_module(module), attribute))
    listed = {name for row in table_rows(ALGORITHMS, heading) for name in NAMES.findall(row[0])}
    assert listed == known


def test_the_snippet_of_the_page_of_algorithms_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = blocks(ALGORITHMS, "python")[0]
    exec(compile(code, "algorithms.md", "exec"), {})
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out.splitlines() == promised
