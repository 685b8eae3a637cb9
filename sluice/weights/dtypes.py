"""The dtypes that may travel, by the names that `TensorSpec` and the protocol use."""

from __future__ import annotations

import torch

from sluice.errors import InvalidRequestError

_WIRE_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


_BY_NAME = {dtype_name(dtype): dtype for dtype in _WIRE_DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        InvalidRequestError: the name is unknown or the dtype does not travel.
    """
    if name not in _BY_NAME:
        raise InvalidRequestError(
            f'dtype "{name}" does not travel on the weight wire; use one of '
            f"{', '.join(sorted(_BY_NAME))}"
        )
    return _BY_NAME[name]
