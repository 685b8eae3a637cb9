"""Rows with images as verl writes them (Geometry3k): read beside their file, within limits."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from services.reward.prompts.dataset import (
    IssuedRow,
    training_files,
    training_stream,
    validation_files,
    validation_stream,
)
from sluice.config.schema.data import DataConfig
from sluice.data.prompt_files import open_prompt_files, without_duplicates
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from sluice.types import DataProgress
from sluice.vision.image_limits import ImageLimits
from tests.support.image_files import png
from tests.support.prompt_parquet import prompt_rows, write_prompts

LIMITS = ImageLimits(max_images=2, max_bytes=1000, max_total_bytes=1500, max_pixels=100)
ONE, TWO = png(shade=1), png(shade=2)


def written(path: Path, content: str, images: object) -> str:
    rows = prompt_rows(["plain", content])
    rows[0]["images"], rows[1]["images"] = [], images
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)
    return str(write_prompts(path, rows))


def sampled(path: str, limits: ImageLimits | None = LIMITS) -> list[IssuedRow]:
    data = DataConfig(train_files=path, shuffle=False)
    files = training_files(data, limits)
    assert files is not None
    progress = DataProgress(0)
    return training_stream(
        files, data, total_epochs=1, progress=progress, images=limits, check_data_source=None
    ).take(9)


def test_geometry3k_rows_bring_their_bytes(tmp_path: Path) -> None:
    images = [{"bytes": ONE, "path": None}, {"bytes": TWO, "path": "x.png"}]
    path = written(tmp_path / "a.parquet", "<image> and <image>: which?", images)
    assert [draw.images for draw in sampled(path)] == [(), (ONE, TWO)]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_relative_paths_are_beside_the_file_of_the_row(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(ONE)
    (tmp_path / "two.png").write_bytes(TWO)
    paths = ["pictures/one.png", str(tmp_path / "two.png")]
    path = written(tmp_path / f"a.{suffix}", "<image><image>", paths)
    assert sampled(path)[1].images == (ONE, TWO)


def test_bare_bytes_and_base64_in_json_lines_are_read(tmp_path: Path) -> None:
    assert sampled(written(tmp_path / "a.parquet", "<image>", [ONE]))[1].images == (ONE,)
    text = b64encode(TWO).decode()
    for image in ({"bytes": text}, f"data:image/png;base64,{text}"):
        assert sampled(written(tmp_path / "a.jsonl", "<image>", [image]))[1].images == (TWO,)


def test_validation_rows_bring_their_images(tmp_path: Path) -> None:
    data = DataConfig(val_files=written(tmp_path / "a.parquet", "<image>", [{"bytes": ONE}]))
    files = validation_files(data, LIMITS)
    assert files is not None
    assert [draw.images for draw in validation_stream(files, data, LIMITS, None).take(9)] == [
        (),
        (ONE,),
    ]


def test_a_text_that_says_image_needs_none_where_there_is_no_column(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", prompt_rows(["what does <image> mean?"]))
    assert sampled(str(path))[0].images == ()


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("<image>", [{"bytes": b"GIF89a", "path": None}], r"images\[0\]: 6 bytes that begin with"),
        ("<image>", [{"bytes": ONE[:-14], "path": None}], r"images\[0\]: a PNG that is cut short"),
        ("<image>", [{"bytes": png(claims=(60_000, 60_000))}], "60000 x 60000 .*max_image_pixels"),
        ("<image>", [{"bytes": ONE + bytes(1000)}], r"images\[0\]: \d+ bytes; .*max_image_mb"),
        ("<image><image>", [{"bytes": ONE + bytes(800)}] * 2, "max_prompt_images_mb"),
        ("<image>" * 3, [{"bytes": ONE}] * 3, "3 images; .*max_prompt_images allows 2"),
        ("none", [{"bytes": ONE}], "0 times <image>, 'images' 1 images"),
        ("<image>", ["missing.png"], r"images\[0\]: no file .*missing\.png; give the path"),
        ("<image>", ["http://example.org/a.png"], r"images\[0\]: no file"),
        ("<image>", ["large.png"], "more than the 1000 bytes that sluice.limits.max_image_mb"),
        ("<image>", ["/dev/zero"], r"images\[0\]: no file /dev/zero"),
        ("<image>", ["a\0b"], r"images\[0\]: "),
    ],
)
def test_an_image_that_cannot_be_used_is_named_by_file_and_row(
    tmp_path: Path, content: str, images: object, message: str
) -> None:
    (tmp_path / "large.png").write_bytes(bytes(1001))
    path = written(tmp_path / "a.parquet", content, images)
    with pytest.raises(DataError, match=message) as error:
        sampled(path)
    assert str(error.value).startswith(f"{path}, row 1: ")


def test_rows_that_differ_in_an_image_alone_are_no_copies(tmp_path: Path) -> None:
    for suffix in ("parquet", "jsonl"):
        images: list[object] = [["a.png"], ["b.png"], ["a.png"]]
        rows = prompt_rows(["<image>"] * 3)
        for row, each in zip(rows, images, strict=True):
            row["images"], row["reward_model"] = each, {"style": "rule", "ground_truth": "1"}
        path = tmp_path / f"a.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            write_prompts(path, rows)
        for columns, kept in ((PromptColumns(images="images"), [0, 1]), (PromptColumns(), [0])):
            files = open_prompt_files([str(path)], columns, config_key="data.train_files")
            found = without_duplicates(files).kept
            assert found is not None
            assert found.tolist() == kept
