"""What the learner asks of its device beside computing: bfloat16, and memory back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.trainer.learner.ranks.parallel import SingleProcess
from services.trainer.learner.update.reference import ReferencePolicy
from services.trainer.learner.worker import Learner
from sluice.config.schema.actor import FsdpConfig
from sluice.device.cpu import CpuDevice
from sluice.errors import ConfigError
from tests.support.tiny_policy import make_config, save_model, with_critic


class OldDevice(CpuDevice):
    """Has no bfloat16; takes note of memory given back."""

    emptied = 0

    def supports_bfloat16(self) -> bool:
        """It does not."""
        return False

    def empty_cache(self) -> None:
        """Counts."""
        self.emptied += 1


@pytest.mark.parametrize(
    ("precision", "remedy"),
    [
        ({"dtype": "bfloat16"}, "fsdp_config.dtype=float32"),
        (
            {"dtype": "bfloat16", "model_dtype": "bfloat16"},
            "fsdp_config.dtype=float32 and actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        ),
    ],
)
def test_bfloat16_is_refused_where_the_device_has_none(
    precision: dict[str, object], remedy: str, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "no model", fsdp_config=precision)
    with pytest.raises(
        ConfigError,
        match=r"^actor_rollout_ref\.actor\.fsdp_config\.dtype=bfloat16.*cpu does not compute.*"
        rf"set actor_rollout_ref\.actor\.{remedy}",
    ):
        Learner(config, SingleProcess(), total_steps=1, device=OldDevice())


def test_a_critics_bfloat16_is_refused_by_its_own_key(tmp_path: Path) -> None:
    config = with_critic(make_config(tmp_path / "no model"))
    config = replace(config, critic=replace(config.critic, fsdp=FsdpConfig(dtype="bfloat16")))
    with pytest.raises(ConfigError, match=r"^critic\.fsdp\.dtype=bfloat16: .*set critic\.fsdp\."):
        Learner(config, SingleProcess(), total_steps=1, device=OldDevice())


def test_float32_is_computed_on_every_device(tmp_path: Path) -> None:
    config = make_config(save_model(tmp_path), fsdp_config={"dtype": "float32"})
    Learner(config, SingleProcess(), total_steps=1, device=OldDevice())


def test_the_references_memory_goes_back_once_its_weights_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(save_model(tmp_path))
    device, places = OldDevice(), []
    reference = ReferencePolicy(
        config.actor_rollout_ref.model,
        FsdpConfig(dtype="float32"),
        device,
        64,
        SingleProcess(),
    )
    to = type(reference._model).to
    monkeypatch.setattr(
        type(reference._model),
        "to",
        lambda model, place: (places.append((place.type, device.emptied)), to(model, place))[1],
    )
    assert reference.logprobs([], 1.0) == []
    assert places == [("cpu", 0), ("cpu", 0)]  # both moves come before
    assert device.emptied == 1
