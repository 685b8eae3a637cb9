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


def measure_prompts(request: PromptsToMeasure) -> list[int | str]:
    """Return the tokens of each prompt, or the reason why it is refused."""
    if not (request.trust_remote_code or reads_images(request.model)):
        sys.modules[_TORCH] = None  # type: ignore[assignment]  # an import of it fails
    from services.rollout.prompt_encoder import PromptEncoder

    encoder = PromptEncoder(
        Path(request.model),
        template_kwargs=request.template_kwargs,
        trust_remote_code=request.trust_remote_code,
    )
    answers: list[int | str] = []
    for turns in request.prompts:
        messages = [ChatMessage(role, content) for role, content in turns]
        try:
            answers.append(int(encoder.encode_chat(messages).size))
        except InvalidRequestError as error:
            answers.append(str(error))
    return answers


def main() -> None:
    """Answer on standard output; nothing else gets there."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    serve_answer(PromptsToMeasure, measure_prompts)


if __name__ == "__main__":
    sys.exit(exit_status("sluice", main))
