"""What names a prompt across visits, epochs and runs: its words, not its place in the data."""

from __future__ import annotations

from hashlib import blake2b

from sluice.types import Prompt

_KEY_BYTES = 16


def prompt_key(prompt: Prompt) -> str:
    """BLAKE2b of messages and ground truth, 16 bytes in hexadecimal."""
    parts = [part for turn in prompt.messages for part in (turn.role, turn.content)]
    encoded = [part.encode() for part in (*parts, prompt.ground_truth)]
    # With their lengths, or "ab" + "c" would be "a" + "bc".
    framed = b"".join([len(part).to_bytes(8, "little") + part for part in encoded])
    return blake2b(framed, digest_size=_KEY_BYTES).hexdigest()
