"""Figures of the code's structure; `make structure`.

The product is `sluice/` and `services/` without the generated `sluice/api`. Lines are lines that
are not blank, with comments and docstrings, `__init__` files included. Prints a table, and as the
last line one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.source_tree import python_files
from tools.check_words import PRODUCT, find_old_words
from tools.traced_paths import prompt_path, submission_to_gradient

ROOT = Path(__file__).resolve().parent.parent
MEANINGS = {
    "widest_folder": "modules directly in the folder that has most",
    "modules": "files of the product, `__init__` apart",
    "product_lines": "of the product's files",
    "test_lines": "of tests/",
    "tool_lines": "of tools/ and benchmarks/",
    "prompt_path_files": (
        "that two prompts pass in the reward service, scorers apart, to the acknowledged batch"
    ),
    "prompt_path_functions": "the same; a comprehension or a lambda counts as one",
    "shared_class_names": "defined in several files of the product, leading underscores apart",
    "old_words": "uses in the product of words of tools/old_words.toml",
    "submission_to_gradient_files": "reward service, embedded engine, train loop and learner",
}


def num_lines(paths: Iterable[Path]) -> int:
    """Count the lines that are not blank."""
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def modules_by_folder() -> Counter[str]:
    """Count the product's modules in each folder; packages' `__init__` are no modules here.

    An `__init__` describes its package. With few exceptions it holds a docstring alone.
    """
    return Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in python_files(*PRODUCT)
        if path.name != "__init__.py"
    )


def shared_class_names() -> dict[str, list[str]]:
    """Return class names that several files of the product define, with those files.

    `_Part` and `Part` are one name: a reader who searches for one finds the other.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for path in python_files(*PRODUCT):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        for name in {node.name.lstrip("_") for node in classes}:
            files[name].append(path.relative_to(ROOT).as_posix())
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def measure(*, shows_details: bool) -> dict[str, int]:
    """Return every figure; with details, print what each is made of."""
    folders, names = modules_by_folder(), shared_class_names()
    words = Counter(finding.word.old[0] for finding in find_old_words(*PRODUCT))
    functions = prompt_path().functions()
    files = Counter(file for file, _ in functions)
    stations = submission_to_gradient()
    if shows_details:
        _show("modules by folder", (f"{n:4} {name}" for name, n in folders.most_common()))
        _show("functions on a prompt's path", (f"{n:4} {file}" for file, n in files.most_common()))
        _show("shared class names", (f"{name}: {', '.join(at)}" for name, at in names.items()))
        _show("old words", (f"{count:4} {word}" for word, count in words.most_common()))
        _show("files by station", (f"{len(at):4} {name}" for name, at in stations.items()))
    return {
        "widest_folder": max(folders.values()),
        "modules": folders.total(),
        "product_lines": num_lines(python_files(*PRODUCT)),
        "test_lines": num_lines(python_files("tests")),
        "tool_lines": num_lines(python_files("tools", "benchmarks")),
        "prompt_path_files": len(files),
        "prompt_path_functions": len(functions),
        "shared_class_names": len(names),
        "old_words": words.total(),
        "submission_to_gradient_files": len(set[str]().union(*stations.values())),
    }


def _show(title: str, lines: Iterator[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in (title, *lines, "")))


def main() -> int:
    """Print the figures; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--details", action="store_true", help="print what figures are made of")
    figures = measure(shows_details=parser.parse_args().details)
    for name, figure in figures.items():
        sys.stdout.write(f"{name:30} {figure:7,}  {MEANINGS[name]}\n")
    sys.stdout.write(f"{json.dumps(figures)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
