"""Weights on their way from the replica's process into SGLang's, as a file that is only memory.

SGLang reads them the way it reads a checkpoint, so that whatever it does to a layer's weights when
it starts is done again: safetensors, no pickle, and no second transfer group. The file has no name
of its own, needs no disk and no /dev/shm, and is gone with the process that holds it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["WeightHandover", "write_safetensors"]

_ALIGNMENT = 8
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(descriptor: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors on the CPU into an open file, in the format safetensors.

    Raises:
        OSError: there is no room.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


class WeightHandover:
    """A folder that holds one version; it has to be closed.

    Args:
        tensors: on the CPU, by checkpoint name; copied.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._descriptor = os.memfd_create("sluice-weights")
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-weights-"))
        try:
            write_safetensors(self._descriptor, tensors)
            link = self.folder / "model.safetensors"
            link.symlink_to(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory, as soon as nobody reads it. Repeating it is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            shutil.rmtree(self.folder, ignore_errors=True)
