"""Which precisions a device computes in."""

from __future__ import annotations

from sluice.config.actor import FsdpConfig
from sluice.device.protocol import Device
from sluice.errors import ConfigError

__all__ = ["check_precision"]


def check_precision(key: str, precision: FsdpConfig, device: Device) -> None:
    """Refuse bfloat16 where no kernel computes with it.

    Args:
        key: where the precision is set.
        precision: of a model that is trained.
        device: that it is trained on.

    Raises:
        ConfigError: names key, value and remedy.
    """
    found = [
        f"{key}.{field}={dtype}"
        for field, dtype in (("dtype", precision.dtype), ("model_dtype", precision.model_dtype))
        if dtype == "bfloat16"
    ]
    if found and not device.supports_bfloat16():
        remedy = " and ".join(setting.replace("bfloat16", "float32") for setting in found)
        raise ConfigError(
            f"{' and '.join(found)}: {device.name} does not compute with bfloat16; set {remedy}, "
            "or train on another device"
        )
