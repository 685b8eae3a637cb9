"""Which layers each stage of a pipeline gets, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from sluice.config.parallel_layout import check_image_layers, stage_layers
from sluice.config.schema.actor import TransformerOverrides
from sluice.errors import ConfigError


def words(cut: dict[str, object]) -> dict[str, object]:
    names = {
        "first": "num_layers_in_first_pipeline_stage",
        "last": "num_layers_in_last_pipeline_stage",
        "embedding": "account_for_embedding_in_pipeline_split",
        "loss": "account_for_loss_in_pipeline_split",
    }
    return {names[name]: value for name, value in cut.items()}


def sizes(layers: int, stages: int, **cut: object) -> list[int]:
    found = stage_layers(layers, stages, TransformerOverrides(**cut))
    assert [one for stage in found for one in stage] == list(range(layers))
    return [len(one) for one in found]


@pytest.mark.parametrize(
    ("layers", "stages", "cut", "expected"),
    [
        (8, 1, {}, [8]),
        (8, 4, {}, [2, 2, 2, 2]),
        (94, 8, {"first": 11, "last": 11}, [11, 12, 12, 12, 12, 12, 12, 11]),
        (7, 2, {"first": 3}, [3, 4]),
        (7, 3, {"last": 1}, [3, 3, 1]),
        (30, 4, {"embedding": True, "loss": True}, [7, 8, 8, 7]),
        (31, 4, {"loss": True}, [8, 8, 8, 7]),
        (2, 2, {"embedding": True, "loss": True}, [1, 1]),
    ],
)
def test_stages_get_their_layers_in_order(
    layers: int, stages: int, cut: dict[str, object], expected: list[int]
) -> None:
    assert sizes(layers, stages, **words(cut)) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "cut", "error"),
    [
        (3, 4, {}, "=4: the model has 3 layers, .* give at most 3"),
        (
            94,
            8,
            {},
            "=8 does not divide 94 layers of the model; give 2 or 47, or .*first.*=11 .*=11",
        ),
        (7, 4, {}, r"give 1 or 7, or .*first\w*=2 with .*last\w*=1$"),
        (30, 4, {"loss": True}, "=4 does not divide 31 layers and loss of the model"),
        (94, 8, {"first": 11}, "=8: this leaves 83 of 94 layers for the other 7 stages"),
        (8, 2, {"first": 3, "last": 3}, "=2: their sum is not the model's 8 layers; give "),
        (8, 2, {"first": 8}, "this leaves 0 of 8 layers for the other 1 stages"),
        (8, 2, {"first": 3, "loss": True}, "give one of both"),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers(
    layers: int, stages: int, cut: dict[str, object], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        sizes(layers, stages, **words(cut))


@pytest.mark.parametrize("layers", [2, 4, 7, 30, 61])
@pytest.mark.parametrize("cut", [{}, {"loss": True}, {"embedding": True, "loss": True}], ids=str)
def test_what_is_proposed_instead_is_accepted(layers: int, cut: dict[str, object]) -> None:
    for stages in range(2, layers + 1):
        try:
            sizes(layers, stages, **words(cut))
        except ConfigError as error:
            numbers, _, keys = str(error).partition("; give ")[2].partition(", or ")
            for number in numbers.split(" or "):
                sizes(layers, int(number), **words(cut))
            given = {key: json.loads(value) for key, value in re.findall(r"(\w+)=(\w+)", keys)}
            sizes(layers, stages, **(words(cut) | given))


def test_the_first_stage_needs_all_layers_that_images_add_to() -> None:
    stages = stage_layers(4, 2, TransformerOverrides())
    check_image_layers(stages, 2)
    check_image_layers(stage_layers(2, 1, TransformerOverrides()), 3)
    why = r"=2: the first stage has 2 of .* 4 layers.* the first 3; set .*first\w*=3 or more"
    with pytest.raises(ConfigError, match=why):
        check_image_layers(stages, 3)
