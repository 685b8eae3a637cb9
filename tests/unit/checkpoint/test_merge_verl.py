"""verl's FSDP shards become the model that was cut, and nothing else does."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from sluice.checkpoint.merge import MergeOptions, merge_checkpoint
from sluice.checkpoint.safetensors_files import compare_weights
from sluice.checkpoint.source import find_source
from sluice.checkpoint.verl_shards import join_parts
from sluice.errors import CheckpointError
from tests.support.layer_parity import random_adapter
from tests.support.saved_adapter import write_adapter
from tests.support.tiny_policy import FAMILIES, make_model, save_model

Layout = Mapping[str, Placement | None]  # None: no DTensor, every rank holds its piece of dim 0


def write_verl_checkpoint(
    folder: Path,
    model: Path,
    weights: Mapping[str, Tensor],
    layout: Layout,
    *,
    mesh_shape: tuple[int, ...] = (2,),
    mesh_names: tuple[str, ...] = ("fsdp",),
) -> Path:
    """Write ``global_step_N/actor`` for a model.

    Args:
        folder: the actor folder.
        model: whose configuration and tokenizer are copied.
        weights: whole ones by name.
        layout: how each is laid over the last mesh dimension; not named ones by ``Shard(0)``.
        mesh_shape: ranks by mesh dimension; dimensions before the last hold copies.
        mesh_names: of the dimensions.
    """
    folder.mkdir(parents=True)
    world_size, num_shards = torch.Size(mesh_shape).numel(), mesh_shape[-1]
    (folder / "fsdp_config.json").write_text(
        json.dumps({"FSDP_version": 2, "world_size": world_size}), encoding="utf-8"
    )
    (folder / "huggingface").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder / "huggingface")
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
            state = {
                name: _piece(whole, layout.get(name, Shard(0)), mesh, rank % num_shards)
                for name, whole in weights.items()
            }
            file = folder / f"model_world_size_{world_size}_rank_{rank}.pt"
            torch.save(state, file)  # noqa: TID251 - as verl does
        finally:
            dist.destroy_process_group()
    return folder


def _piece(whole: Tensor, placement: Placement | None, mesh: DeviceMesh, shard: int) -> Tensor:
    num_shards = mesh.shape[-1]
    if placement is None:
        return whole.chunk(num_shards)[shard].clone()
    local = whole
    if isinstance(placement, Shard):
        # As FSDP: the last ranks may be left with less, or nothing.
        pieces = whole.chunk(num_shards, dim=placement.dim)
        empty = whole.narrow(placement.dim, 0, 0)
        local = pieces[shard] if shard < len(pieces) else empty
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


NORM = "model.norm.weight"
OUT_LAYER = "model.layers.0.self_attn.o_proj"
OUT_PROJECTION = f"{OUT_LAYER}.weight"
PLAIN = "model.layers.1.self_attn.o_proj.weight"
LAYOUT = {NORM: Replicate(), OUT_PROJECTION: Shard(1), PLAIN: None}


def nothing(_done: int, _total: int) -> None:
    """No progress is shown."""


def merged(folder: Path, target: Path, **options: Any) -> Path:
    merge_checkpoint(find_source(folder), target, MergeOptions(**options), nothing)
    return target


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return dict(loaded.state_dict())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "keep"])
@pytest.mark.parametrize(
    ("mesh_shape", "mesh_names"),
    [((2,), ("fsdp",)), ((3,), ("fsdp",)), ((2, 2), ("ddp", "fsdp"))],
    ids=["two", "uneven", "hybrid"],
)
def test_the_cut_model_is_whole_again(
    tmp_path: Path, family: str, dtype: str, mesh_shape: Any, mesh_names: Any
) -> None:
    base = save_model(tmp_path / "base", family)
    whole = dict(make_model(family).state_dict())
    checkpoint = write_verl_checkpoint(
        tmp_path / "global_step_100" / "actor",
        base,
        whole,
        LAYOUT,
        mesh_shape=mesh_shape,
        mesh_names=mesh_names,
    )
    found = weights_of(merged(checkpoint.parent, tmp_path / "out", dtype=dtype))
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        expected = weight if dtype == "keep" else weight.bfloat16()
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == ("float32" if dtype == "keep" else "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "global_step_100", "out"]


@pytest.mark.parametrize("names", ["in memory", "on disk"])
def test_experts_get_the_names_that_engines_read(tmp_path: Path, names: str) -> None:
    """transformers 5 has all experts in one tensor; version 4, like files, each in its own."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{**FAMILIES["qwen3"], "tie_word_embeddings": False},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    on_disk = load_file(tmp_path / "base" / "model.safetensors")
    assert any("experts.3.gate_proj" in name for name in on_disk)
    weights = on_disk if names == "on disk" else dict(model.state_dict())
    checkpoint = write_verl_checkpoint(tmp_path / "actor", tmp_path / "base", weights, {})
    out = merged(checkpoint, tmp_path / "out", dtype="keep")
    assert compare_weights(out, tmp_path / "base", nothing) == []


def test_the_end_tokens_and_sampling_defaults_of_the_checkpoint_are_kept(
    checkpoint: Path, tmp_path: Path
) -> None:
    given = checkpoint / "huggingface" / "generation_config.json"
    given.write_text('{"eos_token_id": [1, 2], "temperature": 0.7, "top_k": 20}', encoding="utf-8")
    found = merged(checkpoint, tmp_path / "out") / given.name
    assert found.read_bytes() == given.read_bytes()


def test_a_critic_keeps_its_value_head(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    config = AutoConfig.from_pretrained(base, num_labels=1)
    critic = AutoModelForTokenClassification.from_config(config)
    checkpoint = write_verl_checkpoint(
        tmp_path / "critic", base, dict(critic.state_dict()), {"score.weight": Replicate()}
    )
    with pytest.raises(CheckpointError, match=r"do not fit LlamaForCausalLM.*--is-value-model"):
        merged(checkpoint, tmp_path / "out", dtype="keep")
    merged(checkpoint, tmp_path / "out", dtype="keep", is_value_model=True)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", dtype="auto")
    for name, weight in critic.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    base = save_model(tmp_path / "base", "llama")
    return write_verl_checkpoint(
        tmp_path / "actor", base, dict(make_model("llama").state_dict()), LAYOUT
    )


def test_a_missing_rank_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"first model_world_size_2_rank_1\.pt; collect"):
        merged(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    shard = checkpoint / "model_world_size_2_rank_1.pt"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"rank_1\.pt cannot be read"):
        merged(checkpoint, tmp_path / "out")


class Evil:
    """Would run a command if it were unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.mkdir, (str(self.marker),)


def test_a_file_that_would_run_code_is_refused_and_runs_none(
    checkpoint: Path, tmp_path: Path
) -> None:
    torch.save({"a": Evil(tmp_path / "ran")}, checkpoint / "model_world_size_2_rank_0.pt")  # noqa: TID251
    with pytest.raises(CheckpointError, match=r"rank_0\.pt cannot be read"):
        merged(checkpoint, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_files_of_former_versions_of_torch_are_read(checkpoint: Path, tmp_path: Path) -> None:
    """Their classes lay elsewhere; pickled names are lines of text, so they can be replaced."""
    for shard in checkpoint.glob("*.pt"):
        with zipfile.ZipFile(shard) as saved:
            parts = {name: saved.read(name) for name in saved.namelist()}
        with zipfile.ZipFile(shard, "w") as former:
            for name, content in parts.items():
                assert not name.endswith("data.pkl") or b"torch.distributed.tensor" in content
                former.writestr(name, _renamed(content) if name.endswith("data.pkl") else content)
    found = weights_of(merged(checkpoint, tmp_path / "out", dtype="keep"))
    for name, weight in make_model("llama").state_dict().items():
        assert torch.equal(found[name], weight), name


def _renamed(pickled: bytes) -> bytes:
    names = {b"tensor\nDTensor\n": b"_tensor.api\nDTensor\n"}
    names |= {
        b"tensor." + part: b"_tensor." + part
        for part in (b"placement_types\nShard\n", b"placement_types\nReplicate\n")
    }
    names |= {
        b"tensor._dtensor_spec\n" + kind: b"_tensor.placement_types\n" + kind
        for kind in (b"DTensorSpec\n", b"TensorMeta\n")
    }
    for present, former in names.items():
        pickled = pickled.replace(b"torch.distributed." + present, b"torch.distributed." + former)
    return pickled


def test_files_of_two_runs_in_one_folder_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model_world_size_4_rank_0.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"runs with \[2, 4\] ranks"):
        merged(checkpoint, tmp_path / "again")


def test_a_mesh_of_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    checkpoint = write_verl_checkpoint(
        tmp_path / "actor",
        base,
        dict(make_model("llama").state_dict()),
        {},
        mesh_shape=(1, 2),
        mesh_names=("dp", "tp"),
    )
    with pytest.raises(CheckpointError, match=r"sharded over \('dp', 'tp'\)"):
        merged(checkpoint, tmp_path / "out")


def test_shards_of_another_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "deeper", "llama", num_hidden_layers=3)
    (checkpoint / "huggingface" / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"do not fit .*first model\.layers\.2"):
        merged(checkpoint, tmp_path / "out")


def test_adapters_are_refused_with_who_merges_them(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    weights = {"base_model.model.lm_head.lora_A.default.weight": torch.ones(2, 2)}
    checkpoint = write_verl_checkpoint(tmp_path / "actor", base, weights, {})
    with pytest.raises(CheckpointError, match=r"LoRA weights .*verl\.model_merger"):
        merged(checkpoint, tmp_path / "out")


def test_whole_weights_with_adapters_names_are_refused_and_the_adapter_beside_them_is_taken(
    tmp_path: Path,
) -> None:
    huggingface = save_model(tmp_path / "actor" / "huggingface", "llama")
    weights = {"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)}
    save_file(weights, huggingface / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"huggingface holds LoRA weights"):
        merged(tmp_path, tmp_path / "out")
    adapter = tmp_path / "actor" / "lora_adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    assert find_source(tmp_path).role == adapter


def test_the_adapter_that_verls_merger_writes_below_its_model_is_added_to_it(
    tmp_path: Path,
) -> None:
    written = save_model(tmp_path / "written", "llama")
    model = make_model("llama")
    adapter = replace(random_adapter(model), base="")
    write_adapter(written / "lora_adapter", adapter)
    found = weights_of(merged(written, tmp_path / "out", dtype="keep"))
    a, b = (adapter.tensors[f"{OUT_LAYER}.lora_{one}.weight"] for one in "AB")
    before = model.get_parameter(f"{OUT_LAYER}.weight")
    torch.testing.assert_close(found[f"{OUT_LAYER}.weight"], before + adapter.scale * (b @ a))


def test_an_adapter_without_a_model_is_not_added_to_the_one_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save_model(tmp_path / "another", "llama"))
    adapter = replace(random_adapter(make_model("llama")), base="")
    write_adapter(tmp_path / "written" / "lora_adapter", adapter)
    with pytest.raises(CheckpointError, match=r"write its folder as base_model_name_or_path"):
        merged(tmp_path / "written" / "lora_adapter", tmp_path / "out")


def test_a_tensor_that_every_rank_holds_whole_is_taken_once() -> None:
    parts = [torch.ones(4), torch.ones(4)]
    assert join_parts("buffer", parts, (4,)).shape == (4,)
    assert join_parts("cut", parts, (8,)).shape == (8,)
    assert join_parts("unknown", parts).shape == (8,)
    assert join_parts("count", [torch.tensor(3), torch.tensor(3)]).shape == ()
    with pytest.raises(CheckpointError, match=r"give shape \(8,\) instead of \(12,\)"):
        join_parts("torn", parts, (12,))


@pytest.mark.parametrize("shape", [(4,), ()])
def test_a_tensor_that_every_rank_holds_whole_and_differently_is_refused(shape: Any) -> None:
    """merge_non_dtensor_shards in verl/model_merger/fsdp_model_merger.py."""
    with pytest.raises(CheckpointError, match=r"buffer: each rank holds it whole, and they differ"):
        join_parts("buffer", [torch.ones(shape), torch.zeros(shape)], shape)


@pytest.mark.parametrize("name", ["dist_ckpt", "transformer_config.json"])
def test_a_megatron_checkpoint_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "actor" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"Megatron.*--backend megatron --local_dir"):
        find_source(tmp_path)
