"""The task with a tool: teachers write what the policy reads, writes and is graded by."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.episodes import blind_jars
from services.reward.grading.scorers.registry import RULES
from services.rollout.prompt_encoder import PromptEncoder
from sluice.environment.loading import file_environment
from sluice.quickstart.jar_environment import Jars
from sluice.quickstart.jars import jar_problems, render_question, teach
from sluice.quickstart.lessons import Segment
from sluice.quickstart.prepare import prepare
from sluice.quickstart.settings import PrepareSettings, WarmStartSettings
from sluice.quickstart.tokenizer import TURN_END
from sluice.types import ChatMessage, Tool

SMALL = PrepareSettings(
    num_train=40,
    num_held_out=8,
    warm_start=WarmStartSettings(max_hold_steps=2, decay_steps=1, batch_dialogues=4),
)
LOOK = Tool(
    "look", "Look into a jar.", '{"type": "object", "properties": {"jar": {"type": "string"}}}'
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jars")
    prepare(folder, task="jars", seed=0, progress=lambda _: None, settings=SMALL)
    return folder


def test_a_teachers_dialogue_is_what_continuations_make_of_its_answers(made: Path) -> None:
    encoder = PromptEncoder(made / "model")
    problem = next(jar_problems("0"))
    prompt, *parts = teach(problem, random.Random(0), guess_rate=0.0)
    ids = encoder.encode_chat([ChatMessage("user", problem.question)], tools=[LOOK])
    assert encoder.decode(ids) == encoder.decode(encoded(encoder, prompt))
    environment = Jars()
    environment.reset(extra_info={"jars": problem.jars})
    for said in parts[:-1:2]:
        response = encoded(encoder, said)
        (call,) = encoder.read_answer(response, tools=[LOOK]).tool_calls
        assert call.name == "look"
        seen = environment.look(call.arguments.split('"')[3])
        ids = np.concatenate([ids, response])
        ids = encoder.encode_continuation(
            ids, [ChatMessage("tool", seen, tool_call_id=call.call_id)], tools=[LOOK]
        )
    whole = [encoded(encoder, part) for part in (prompt, *parts[:-1])]
    assert ids.tolist() == np.concatenate(whole).tolist()


def encoded(encoder: PromptEncoder, part: Segment) -> np.ndarray:
    return encoder.encode_text(part.text, add_special_tokens=False)


def test_a_teacher_who_looks_is_right_and_one_who_guesses_seldom() -> None:
    def share_right(guess_rate: float) -> float:
        guesses = random.Random(1)
        right = 0.0
        for problem in islice(jar_problems("1"), 200):
            said = teach(problem, guesses, guess_rate)[-1].text.removesuffix(TURN_END)
            right += RULES["math_dapo"](said, str(problem.answer))["acc"]  # type: ignore[index]
        return right / 200

    assert share_right(0.0) == 1.0
    assert share_right(1.0) < 0.2


def test_the_prompt_shows_no_number_and_blind_jars_show_others() -> None:
    problem = next(jar_problems("2"))
    assert not any(letter.isdigit() for letter in render_question(problem.question))
    episode = file_environment(blind_jars.__file__, "BlindJars")
    assert [tool.name for tool in episode.tools] == ["look"]
    blind = blind_jars.BlindJars()
    blind.reset(extra_info={"jars": problem.jars})
    assert any(blind.look(jar) != str(number) for jar, number in problem.jars.items())


def test_rows_carry_the_jars_beside_the_prompt(made: Path) -> None:
    rows = pq.read_table(made / "data" / "test.parquet").to_pylist()
    assert len(rows) == SMALL.num_held_out
    for row in rows:
        jars = row["extra_info"]["jars"]
        asked = row["prompt"][0]["content"].removeprefix("Add jar ").split(".")[0].split(" and ")
        assert row["reward_model"]["ground_truth"] == str(sum(jars[jar] for jar in asked))
