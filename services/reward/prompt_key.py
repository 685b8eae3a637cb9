"""What names a prompt across visits, epochs and runs: its words, not its place in the data."""

from __future__ import annotations

from hashlib import blake2b

from sluice.types import Prompt

_KEY_BYTES = 16


def prompt_key(prompt: Prompt) -> str:
    """BLAKE2b of messages and ground truth, 16 bytes in hexadecimal."""
    digest = blake2b(digest_size=_KEY_BYTES)
    parts = [part for turn in prompt.messages for part in (turn.role, turn.content)]
    for part in (*parts, prompt.ground_truth):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # or "ab" + "c" would be "a" + "bc"
        digest.update(encoded)
    return digest.hexdigest()
