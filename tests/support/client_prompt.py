"""A client's prompt."""

from __future__ import annotations

from sluice.types import ChatMessage, Prompt, PromptOrigin


def client_prompt(
    content: str = "answer=1 right=1", prompt_id: str = "p0", images: tuple[bytes, ...] = ()
) -> Prompt:
    """A prompt with one user turn, whose reference answer is 1."""
    message = ChatMessage("user", content)
    return Prompt(
        prompt_id, 0, (message,), "math_dapo", "1", PromptOrigin.CLIENT, None, images=images
    )
