"""Whether a safetensors file is whole, by its header alone.

Format: 8 bytes little-endian, the length of a JSON header; the header, with the place of each
tensor behind it (`data_offsets`); the tensors. Loads no torch and reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20  # what the format's own reader accepts
_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file.

    Attributes:
        size_bytes: of the file.
        defect: why it is not whole; empty if it is.
        tensors: names of those in it.
    """

    size_bytes: int
    defect: str = ""
    tensors: frozenset[str] = field(default_factory=frozenset)


def read_shard(path: Path) -> Shard:
    """Reads the header.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return Shard(size, "is a pointer of git-lfs, not the file itself")
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if len(start) < _LENGTH_BYTES or length > _LONGEST_HEADER:
            return Shard(size, "has no header of safetensors")
        if _LENGTH_BYTES + length > size:
            return Shard(size, f"ends within its header, after {size} bytes")
        file.seek(_LENGTH_BYTES)
        return _judged(size, length, file.read(length))


def _judged(size: int, length: int, header: bytes) -> Shard:
    try:
        content = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        places: Mapping[str, _Place] = {
            name: msgspec.json.decode(place, type=_Place)
            for name, place in content.items()
            if name != _METADATA
        }
    except msgspec.DecodeError as error:
        return Shard(size, f"has a header that cannot be read ({error})")
    end = max((place.data_offsets[1] for place in places.values()), default=0)
    expected = _LENGTH_BYTES + length + end
    defect = "" if size == expected else f"has {size} bytes, and its header tells of {expected}"
    return Shard(size, defect, frozenset(places))
