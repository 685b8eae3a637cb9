"""States of torch's random generators, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["random_state", "restore_random_state"]

_CPU = "cpu"


def random_state(device: torch.device) -> dict[str, str]:
    """States of the CPU's generator and of the device's own as hex, by device type."""
    states = {_CPU: torch.get_rng_state()}
    if device.type != _CPU:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: state.numpy().tobytes().hex() for kind, state in states.items()}


def restore_random_state(states: Mapping[str, str], device: torch.device) -> None:
    """Go on from what `random_state` returned; that of another type of device is left out.

    Raises:
        ValueError: a state is not hex.
        RuntimeError: a state has another length than the generator's.
    """
    for kind, state in states.items():
        if kind == _CPU:
            torch.set_rng_state(_from_hex(state))
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(_from_hex(state), device)


def _from_hex(state: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(state), dtype=np.uint8).copy())
