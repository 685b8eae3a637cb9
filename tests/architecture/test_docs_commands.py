"""Every `sluice …` command and every configuration key that a document quotes exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from sluice.cli.main import commands as application
from sluice.config.catalogue.table import catalogue
from sluice.config.explain import explain_key
from sluice.config.loading.keys import is_known
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from tests.support.documents import DOCUMENTS, blocks, code_words, commands
from tests.support.source_tree import ROOT, name_of

KEY = re.compile(
    r"(?:data|actor_rollout_ref|algorithm|reward|reward_model|custom_reward_function|critic|trainer"
    r"|distillation|sluice)(?:\.[a-z_][a-zA-Z0-9_]*)+(?:\.\*)?"
)
HAND_WRITTEN = [d for d in DOCUMENTS if d.name != "configuration.md"]
COLUMNS = {"reward_model.ground_truth", "reward_model.style"}
FILES = {
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".parquet",
    ".jsonl",
    ".json",
    ".proto",
    ".log",
    ".html",
    ".pt",
}


@cache
def cached_command() -> Any:
    """The whole command line, which takes 40 ms to build."""
    return get_command(application)


def problem_of(words: list[str]) -> str | None:
    """What is wrong with a command line; nothing is run."""
    command = cached_command()
    context = command.make_context("sluice", [], resilient_parsing=True)
    context.resilient_parsing = False  # else the parser passes over unknown options
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    if isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        return f"no command '{words[0]}'"
    try:
        command.make_parser(context).parse_args(list(words))
    except Exception as error:  # noqa: BLE001 - typer bundles its own click, whose errors are private
        return str(error)
    return None


def is_a_module(word: str) -> bool:
    """Whether it names a module of ours or something in one, not a key."""
    parts = word.split(".")
    for end in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.is_dir() or path.with_suffix(".py").is_file():
            return True
    return False


def quoted_keys(document: Path) -> set[str]:
    words = {word for word in code_words(document) if KEY.fullmatch(word)} - COLUMNS
    return {w for w in words if Path(w).suffix not in FILES and not is_a_module(w)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_quoted_command_parses(document: Path) -> None:
    wrong = [f"sluice {' '.join(w)}: {p}" for w in commands(document) if (p := problem_of(w))]
    assert not wrong


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_every_quoted_key_is_known(document: Path) -> None:
    unknown = []
    for key in sorted(quoted_keys(document)):
        section = tuple(key.removesuffix(".*").split("."))
        try:
            explain_key(key)
        except ConfigError as error:
            if not is_known(section):
                unknown.append(str(error))
    assert not unknown


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_every_quoted_configuration_has_known_keys_and_values_of_their_types(
    document: Path, tmp_path: Path
) -> None:
    for number, block in enumerate(blocks(document, "yaml")):
        file = tmp_path / f"block-{number}.yaml"
        file.write_text(block, encoding="utf-8")
        load_config(file, [])


def test_a_wrong_command_or_option_is_seen() -> None:
    assert problem_of(["config", "check", "run.yaml", "--device-memory", "80"]) is None
    assert problem_of(["generate", "hello", "-n", "4"]) is None
    assert problem_of(["config", "lint"]) is not None
    assert problem_of(["train", "--no-such-option"]) is not None
    assert problem_of(["config", "check", "--device-memory"]) is not None


def test_the_documents_quote_commands_and_keys() -> None:
    assert sum(len(commands(document)) for document in DOCUMENTS) > 20
    assert len({key for document in HAND_WRITTEN for key in quoted_keys(document)}) > 60
    assert "data.train_batch_size" in catalogue()


def test_every_page_is_linked_from_the_index_and_the_index_from_the_readme() -> None:
    docs = ROOT / "docs"
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (docs / "index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"index.md"}
    assert not [page for page in sorted(pages) if f"({page})" not in index]
