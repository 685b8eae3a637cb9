"""Files of prompts under the names by which this service knows them."""

from __future__ import annotations

from sluice.data.prompt_files import PromptFiles, open_prompt_files

__all__ = ["PromptFiles", "open_prompt_files"]
