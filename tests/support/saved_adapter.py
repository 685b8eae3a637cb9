"""An adapter in peft's files."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from sluice.checkpoint.adapter_files import (
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    Adapter,
    write_adapter_config,
)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write both files; create the folder."""
    folder.mkdir(parents=True)
    write_adapter_config(folder, adapter.rank, adapter.alpha, adapter.layers, adapter.base)
    tensors = {f"{ADAPTER_PREFIX}{name}": one for name, one in adapter.tensors.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS)
