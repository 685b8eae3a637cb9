"""Loading a model, the device that trains it, and its optimizer's schedule."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import decoder
from services.trainer.learner.model.loading import check_engine_length, load_policy
from services.trainer.learner.model.optimizer import ModelOptimizer
from services.trainer.learner.rank_shares import rotation_by_length
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.reference import ReferencePolicy
from sluice.config.loading.loader import load_config
from sluice.config.schema.actor import FsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.cpu import CpuDevice
from sluice.errors import ConfigError
from tests.support.tiny_policy import make_config, save_model, with_critic

FLOAT32 = FsdpConfig(dtype="float32")


def load(folder: Path, precision: FsdpConfig = FLOAT32, *, checkpointing: bool = False) -> None:
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    load_policy(model, precision, max_tokens=28)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path='.*': no config\.json there; give the dir"):
        load(tmp_path)


def test_a_broken_configuration_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path='.*' cannot be loaded"):
        load(tmp_path)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing .* first model\.norm\.weight"):
        load(folder)


def test_a_sliding_window_that_hides_tokens_is_refused_at_start(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "mistral", sliding_window=27)
    with pytest.raises(ConfigError, match=r"sliding_window=27, shorter than .* = 28"):
        load(folder)


def test_a_sliding_window_over_every_sequence_is_accepted(tmp_path: Path) -> None:
    load(save_model(tmp_path, "mistral", sliding_window=28))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rotation_that_the_longest_row_of_a_pass_changes_is_refused_at_start(
    kind: str, tmp_path: Path
) -> None:
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    for limit in (28, 27):
        changes: dict[str, object] = {"max_position_embeddings": limit}
        if kind == "longrope":
            rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            rope["original_max_position_embeddings"] = limit
            changes = {}
        folder = save_model(tmp_path / str(limit), "llama", rope_parameters=rope, **changes)
        if limit == 28:
            load(folder)
    with pytest.raises(ConfigError, match=rf"rope_type={kind}, .*max_position_emb.*=27, .* = 28, "):
        load(folder)


def test_an_engine_for_longer_rows_than_the_rotation_allows_is_refused_at_start(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = save_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=28)
    config = AutoConfig.from_pretrained(folder)
    check_engine_length(config, 28)
    with pytest.raises(ConfigError, match=r"max_model_len=29: .* dynamic, changes beyond .*=28"):
        check_engine_length(config, 29)


def test_a_rotation_that_depends_on_the_length_is_found_in_one_type_of_layers() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    by_type = {"full_attention": dynamic, "sliding_attention": {"rope_type": "default"}}
    settings = {"rope_parameters": by_type, "max_position_embeddings": 27}
    text = SimpleNamespace(to_dict=lambda: settings)
    rotation = rotation_by_length(SimpleNamespace(get_text_config=lambda: text))
    assert rotation == ("dynamic", "max_position_embeddings", 27)


def test_computing_more_precisely_than_the_weights_is_refused(tmp_path: Path) -> None:
    precision = FsdpConfig(model_dtype="bfloat16", dtype="float32")
    with pytest.raises(ConfigError, match="set model_dtype=float32 or dtype=bfloat16"):
        load(tmp_path, precision)


class OldDevice(CpuDevice):
    """A device without bfloat16 that counts calls of `empty_cache`."""

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
        Learner(config, ParallelContext(), total_steps=1, device=OldDevice())


def test_a_critics_bfloat16_is_refused_by_its_own_key(tmp_path: Path) -> None:
    config = with_critic(make_config(tmp_path / "no model"))
    config = replace(config, critic=replace(config.critic, fsdp=FsdpConfig(dtype="bfloat16")))
    with pytest.raises(ConfigError, match=r"^critic\.fsdp\.dtype=bfloat16: .*set critic\.fsdp\."):
        Learner(config, ParallelContext(), total_steps=1, device=OldDevice())


def test_a_critic_with_a_head_of_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_critic(make_config(save_model(tmp_path)))
    monkeypatch.setattr(decoder, "VALUE_HEADS", ("regressor",))
    with pytest.raises(ConfigError, match=r"^critic\.model\.path='.*': the head of a \w+ model"):
        Learner(config, ParallelContext(), total_steps=1)


def test_float32_is_computed_on_every_device(tmp_path: Path) -> None:
    config = make_config(save_model(tmp_path), fsdp_config={"dtype": "float32"})
    Learner(config, ParallelContext(), total_steps=1, device=OldDevice())


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
        ParallelContext(),
        TransformerOverrides(),
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


OPTIM = "actor_rollout_ref.actor.optim"


def rates(*overrides: str, steps: int = 9, total: int = 8) -> list[float]:
    config = load_config(None, [f"{OPTIM}.lr=1.0", *(f"{OPTIM}.{one}" for one in overrides)])
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ModelOptimizer({"w": weight}, config.actor_rollout_ref.actor.optim, total)
    return [optimizer.begin_batch(step) for step in range(steps)]


def test_the_number_of_waves_reaches_the_cosine_schedule() -> None:
    once, twice = rates("lr_scheduler_type=cosine"), rates("warmup_style=cosine", "num_cycles=1")
    assert once[4] == pytest.approx(0.5)
    assert (once[8], twice[4], twice[8]) == pytest.approx((0.0, 0.0, 1.0))


@pytest.mark.parametrize("key", ["lr_scheduler_type", "lr_decay_style"])
def test_the_inverse_square_root_is_asked_for_in_either_spelling(key: str) -> None:
    found = rates(f"{key}=inverse_square_root", "lr_warmup_steps=2")
    assert found[:3] == [0.0, 0.5, 1.0]
    assert found[8] == pytest.approx(math.sqrt(2 / 8))


def test_a_length_of_its_own_takes_the_place_of_the_runs() -> None:
    assert rates("lr_scheduler_type=linear", "total_training_steps=4")[4] == 0.0
    assert rates("lr_scheduler_type=linear")[4] == pytest.approx(0.5)
