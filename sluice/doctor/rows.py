"""The first rows of the files of prompts, which several checks look at."""

from __future__ import annotations

from itertools import islice

from sluice.config.derived import prompt_images
from sluice.config.run import RunConfig
from sluice.config.sources import prompt_files
from sluice.data.prompt_files import PromptFiles, SlabReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow

ROWS_LOOKED_AT = 256


def opened_rows(config: RunConfig, key: str) -> tuple[PromptFiles, list[PromptRow]]:
    """Return the files of a key, as the reward service opens them, and decoded rows: the first ones
    of the first file, and one of each other file.

    Raises:
        DataError: a file or a row cannot be used.
    """
    data, with_images = config.data, prompt_images(config) is not None
    columns = PromptColumns.of(
        data.prompt_key, data.reward_fn_key, data.image_key, with_images=with_images
    )
    files = open_prompt_files(prompt_files(config)[key], columns, config_key=key)
    reader, rows, seen = SlabReader(), list[PromptRow](), set[str]()
    for block in files.blocks:
        if block.path not in seen:
            count = 1 if seen else ROWS_LOOKED_AT
            seen.add(block.path)
            for slab in islice(reader.read(block), 1):
                rows += (slab.decode(index, columns) for index in range(min(len(slab), count)))
    return files, rows
