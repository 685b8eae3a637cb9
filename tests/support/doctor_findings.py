"""What tests of `sluice doctor` ask of findings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sluice.doctor.finding import DoctorContext, Finding, FindingSeverity, read_doctor_context


def severities(findings: Iterable[Finding]) -> list[str]:
    """In their order."""
    return [str(one.severity) for one in findings]


def only(findings: Iterable[Finding], severity: str) -> Finding:
    """The only finding, of this severity; unless all is well it says why and what to do."""
    (found,) = findings
    assert found.severity == severity, found
    assert bool(found.why and found.remedy) == (found.severity is not FindingSeverity.OK), found
    return found


def run_of(*overrides: str, environment: dict[str, str] | None = None) -> DoctorContext:
    """A run with these settings."""
    return read_doctor_context(None, list(overrides), environment or {})


def write_model(folder: Path, *, shards: int = 2) -> list[Path]:
    """A folder with configuration, tokenizer, and weights in several files with an index."""
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "num_hidden_layers": shards,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    files, weight_map = [], {}
    for index in range(shards):
        name = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        tensor = f"model.layers.{index}.weight"
        save_file({tensor: np.ones((64, 64), np.float32)}, folder / name)
        weight_map[tensor] = name
        files.append(folder / name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return files
