"""Images of a row: their sources are read where the column is named, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.data.image_sources import ImageSource
from sluice.data.prompt_files import ChunkReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from tests.support.prompt_parquet import prompt_rows, write_prompts

COLUMNS = PromptColumns(images="images")


def images_of(tmp_path: Path, content: str, images: object) -> tuple[ImageSource, ...]:
    rows = prompt_rows(["plain", content])
    rows[0]["images"] = []
    rows[1]["images"] = images
    path = write_prompts(tmp_path / "a.parquet", rows)
    files = open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    (chunk,) = ChunkReader().read(files.blocks[0])
    return chunk.decode(1, files.columns).images


def test_bytes_come_before_paths(tmp_path: Path) -> None:
    images = [{"bytes": b"png", "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    assert images_of(tmp_path, "<image><image> which?", images) == (b"png", "b.png")


def test_a_list_of_paths_is_taken_as_it_is(tmp_path: Path) -> None:
    assert images_of(tmp_path, "<image> which?", ["a.png"]) == ("a.png",)


def test_verls_other_name_of_a_path_and_a_uri_of_a_file_are_read(tmp_path: Path) -> None:
    images = [{"image": "a.png"}, {"image": "file:///data/b.png"}]
    assert images_of(tmp_path, "<image><image> which?", images) == ("a.png", "/data/b.png")
    (tmp_path / "c").mkdir()
    plain = images_of(tmp_path / "c", "<image> which?", ["file:///data/b.png"])
    assert plain == ("/data/b.png",)


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("<image>", [{"bytes": b"a", "max_pixels": 9}], r"'images\[0\]' sets max_pixels, and all"),
        ("<image>?", [{"bytes": None, "path": None}], r"'images\[0\]' holds neither the bytes"),
        ("no mark", [{"bytes": b"a", "path": None}], "0 times <image>, 'images' 1 images"),
        ("<image> mark", [], "1 times <image>, 'images' 0 images"),
        ("<image> mark", None, "1 times <image>, 'images' 0 images"),
    ],
)
def test_images_that_cannot_be_used_are_named_by_file_and_row(
    tmp_path: Path, content: str, images: object, message: str
) -> None:
    with pytest.raises(DataError, match=message) as error:
        images_of(tmp_path, content, images)
    assert f"{tmp_path / 'a.parquet'}, row 1: " in str(error.value)


def test_a_column_that_is_no_list_is_refused_before_any_row_is_read(tmp_path: Path) -> None:
    rows = prompt_rows(["a"])
    rows[0]["images"] = "a.png"
    path = write_prompts(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=r"column 'images' is string, not a list"):
        open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")


def test_without_a_name_no_image_is_read(tmp_path: Path) -> None:
    rows = prompt_rows(["<image> a"])
    rows[0]["images"] = ["a.png"]
    path = write_prompts(tmp_path / "a.parquet", rows)
    files = open_prompt_files([str(path)], PromptColumns(), config_key="data.train_files")
    assert "images" not in files.blocks[0].columns
