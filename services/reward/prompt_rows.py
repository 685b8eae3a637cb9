"""Rows of prompts under the names by which this service knows them."""

from __future__ import annotations

from sluice.data.prompt_rows import PromptColumns, PromptRow

__all__ = ["PromptColumns", "PromptRow"]
