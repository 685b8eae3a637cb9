"""A model's configuration file says whether it reads images; where there is none, nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.vision.vision_shape import reads_images


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}', True),
        ('{"model_type": "qwen2", "hidden_size": 8}', False),
        ('{"model_type": "qwen3_vl_moe"}', True),
        ('{"model_type": "gemma3", "vision_config": {"depth": 2}}', False),
        ('{"model_type": ["qwen2_vl"]}', False),
        ('{"vision_config": null}', False),
        ("no json", None),
        ("[1]", None),
        (None, None),
    ],
)
def test_a_model_of_a_known_family_reads_images(
    tmp_path: Path, config: str | None, expected: bool | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert reads_images(tmp_path) is expected
    assert reads_images(str(tmp_path)) is expected
