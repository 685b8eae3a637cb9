"""Arguments of a vendor's engine by its own names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from services.rollout.engines.vendor.settings import with_engine_kwargs
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError

_SECTION = "actor_rollout_ref.rollout.engine_kwargs"
_KEYS: Mapping[str, object] = {"eager": False, "blocks": 7, "seed": None}


def _chosen(*overrides: str) -> dict[str, object]:
    config = load_config(None, [f"+{_SECTION}.{one}" for one in overrides])
    rollout = config.actor_rollout_ref.rollout
    return with_engine_kwargs(_KEYS, rollout, "SGLang", {"model": "set the model's key"})


def test_engine_kwargs_win_and_a_null_leaves_the_choice_to_the_vendor() -> None:
    assert _chosen() == {"eager": False, "blocks": 7}
    chosen = _chosen("sglang.eager=true", "sglang.blocks=null", "sglang.backend=fa3")
    assert chosen == {"eager": True, "backend": "fa3"}


def test_those_of_another_vendor_have_no_effect() -> None:
    assert _chosen("vllm.eager=true") == _chosen()


def test_what_the_adapter_relies_on_is_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.sglang\.model cannot be set: set the"):
        _chosen("sglang.model=other")


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.sglang is 3; .* SGLang's engine"):
        _chosen("sglang=3")
