"""Count the tokens of prompts with a model's chat template before a run starts, in a separate
process.

``python -m services.rollout.prompt_check`` reads `PromptsToMeasure` from standard input and
writes a list to standard output: the tokens of each prompt, or why the template refuses it. It ends
with 1 and the reason on standard error if the tokenizer cannot be loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sluice.concurrency.answers import serve_answer
from sluice.concurrency.process import exit_status
from sluice.doctor.trial import PromptsToMeasure
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage
from sluice.vision.vision_shape import reads_images

# Tokenizers need no torch, which takes seconds to load.
_TORCH = "torch"


def measured(asked: PromptsToMeasure) -> list[int | str]:
    """Return the tokens of each prompt, or the reason why it is refused."""
    if not (asked.trust_remote_code or reads_images(asked.model)):
        sys.modules[_TORCH] = None  # type: ignore[assignment]  # an import of it fails
    from services.rollout.prompt_encoder import PromptEncoder

    encoder = PromptEncoder(
        Path(asked.model),
        template_kwargs=asked.template_kwargs,
        trust_remote_code=asked.trust_remote_code,
    )
    answers: list[int | str] = []
    for turns in asked.prompts:
        messages = [ChatMessage(role, content) for role, content in turns]
        try:
            answers.append(int(encoder.encode_chat(messages).size))
        except InvalidRequestError as error:
            answers.append(str(error))
    return answers


def main() -> None:
    """Answer on standard output; nothing else gets there."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    serve_answer(PromptsToMeasure, measured)


if __name__ == "__main__":
    sys.exit(exit_status("sluice", main))
