"""How a photograph is to be turned, read from its EXIF part without any EXIF library.

A general reader of EXIF copies what every entry points at, and many entries may point at the same
bytes. Here one entry of two bytes is looked for (EXIF 2.32, section 4.6; TIFF 6.0, section 2).
"""

from __future__ import annotations

import struct
from struct import unpack_from

__all__ = ["MAX_EXIF_BYTES", "UPRIGHT", "exif_orientation"]

MAX_EXIF_BYTES = 1 << 16
"""A longer part is not read; JPEG cannot hold a longer one."""
UPRIGHT = 1

_PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_TAG, _SHORT, _ENTRY_BYTES = 0x0112, 3, 12


def exif_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8; 1 (upright) where none can be read.

    Args:
        exif: a TIFF header and its directories, with or without ``Exif`` and two zeros before it.
    """
    tiff = exif.removeprefix(_PREFIX)
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(exif) > MAX_EXIF_BYTES:
        return UPRIGHT
    try:
        (directory,) = unpack_from(f"{order}I", tiff, 4)
        (entries,) = unpack_from(f"{order}H", tiff, directory)
        for entry in range(entries):
            place = directory + 2 + entry * _ENTRY_BYTES
            tag, kind, count, value = unpack_from(f"{order}HHIH", tiff, place)
            if tag == _TAG:
                is_one = kind == _SHORT and count == 1 and 1 <= value <= 8
                return int(value) if is_one else UPRIGHT
    except struct.error:  # it points beyond its end
        return UPRIGHT
    return UPRIGHT
