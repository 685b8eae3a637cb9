"""What names a prompt across visits, epochs and runs: what it says, not its place in the data."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from sluice.types import Prompt

_KEY_BYTES = 16
_FRAME = Struct("<Q").pack


def prompt_key(prompt: Prompt) -> str:
    """BLAKE2b of messages, ground truth and images, 16 bytes in hexadecimal."""
    framed: list[bytes] = []
    for turn in prompt.messages:
        framed += _framed(turn.role), _framed(turn.content)
    framed.append(_framed(prompt.ground_truth))
    framed += (blake2b(image, digest_size=_KEY_BYTES).digest() for image in prompt.images)
    return blake2b(b"".join(framed), digest_size=_KEY_BYTES).hexdigest()


def _framed(part: str) -> bytes:
    """With its length, or "ab" + "c" would be "a" + "bc"."""
    encoded = part.encode()
    return _FRAME(len(encoded)) + encoded
