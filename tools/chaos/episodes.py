"""What is left of the episodes of a run under chaos: each of a group that ended has an outcome and
was trained once with its group, and each reward is one that the jar game gives for its turns.

Sources are the reward service's group log, its archive of samples, and the dumps of train batches.
`verdict` has the account of the groups' prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from services.reward.grading.scorers.math_dapo import compute_score
from sluice.config.run import RunConfig
from sluice.telemetry.samples import FOLDER_NAME, archive_files
from sluice.types import PromptEnd
from tools.chaos.verdict import TRAINED

_ENDS = frozenset(end.value for end in PromptEnd)
_DROPPED = "dropped_"  # what ends begin with that need no sample
_CALL = re.compile(r"\{\"name\".*?\}\}")  # texts lack the special tokens around it
_UNREADABLE = "[tool] Error: the call cannot be read: "  # the marks that it lacks are not in texts

Line = Mapping[str, Any]
Games = Mapping[tuple[str, str], Sequence[Mapping[str, int]]]
"""The jars of each row, by question and answer; two rows may ask alike."""


def judge_episodes(
    lines: Sequence[Line], trained: Mapping[int, Mapping[str, int]], config: RunConfig
) -> tuple[dict[str, object], dict[str, list[str]]]:
    """Judge the episodes of a run that has ended; return figures of the report, and examples of
    what has to be 0, by key.

    Args:
        lines: of its group log.
        trained: samples by prompt, of the steps in the final weights.
        config: of the run.
    """
    run_dir, num_samples = Path(config.sluice.run_dir), config.actor_rollout_ref.rollout.n
    archive = list(read_lines(archive_files(run_dir / FOLDER_NAME)))
    lost = lost_episodes(lines, trained, num_samples)
    doubled = doubled_episodes(lines, trained, num_samples)
    may_post, games = config.sluice.environment.agents, read_games(config.data.train_files)
    rewards = failure_rewards(lines, archive, games, may_post=may_post)
    responses = [one for group in archive for one in group.get("responses", ())]
    failures = [one["failure"].partition(":")[0] for one in responses if one.get("failure")]
    figures: dict[str, object] = {
        "episodes_lost": sum(lost.values()),
        "episodes_doubled": sum(doubled.values()),
        "failure_rewards": len(rewards),
        "groups_ended": dict(Counter(line["end"] for line in lines)),
        "episodes_trained": sum(sum(samples.values()) for samples in trained.values()),
        "episodes_replayed": sum("reward" in one for one in responses),
        "episodes_failed": dict(Counter(failures)),
    }
    examples = {
        "episodes_lost": list(lost),
        "episodes_doubled": list(doubled),
        "failure_rewards": rewards,
    }
    return figures, examples


def read_games(files: str | list[str] | None) -> Games:
    """Return the games of a data set."""
    found: dict[tuple[str, str], list[Mapping[str, int]]] = {}
    columns = ["prompt", "reward_model", "extra_info"]
    for row in pq.read_table(files, columns=columns).to_pylist():
        key = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
        found.setdefault(key, []).append(row["extra_info"]["jars"])
    return found


def read_lines(files: Iterable[Path]) -> Iterator[Line]:
    """Yield the objects of files of JSON lines; a killed process leaves half a line."""
    for file in files:
        if not file.is_file():
            continue
        for line in file.read_text("utf-8").split("\n"):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def lost_episodes(
    lines: Sequence[Line], trained: Mapping[int, Mapping[str, int]], num_samples: int
) -> dict[str, int]:
    """Return what was lost, each with the number of samples.

    Args:
        lines: of the group log.
        trained: samples by prompt (0: not known), of the steps in the final weights.
        num_samples: of each group.
    """
    lost = {}
    for line in lines:
        name, end, graded = line["prompt_id"], line["end"], len(line["tokens"])
        if end not in _ENDS:
            lost[f"{name} ended as {end!r}"] = num_samples
        elif graded != num_samples and (graded or not end.startswith(_DROPPED)):
            lost[f"{name} ({end}) has {graded} samples"] = num_samples - graded
    for (step, name), scored in _scored(lines).items():
        if 0 < (rows := trained.get(step or 0, {}).get(name, 0)) < scored:
            lost[f"{name} was trained with {rows} of {scored}"] = scored - rows
    return lost


def _scored(lines: Iterable[Line]) -> dict[tuple[int | None, str], int]:
    """Return the scored samples of trained groups by step and prompt.

    A step that died with its trainer may be trained again with the same prompt, sampled again: the
    last line of both counts.
    """
    return {
        (line["step"], line["prompt_id"]): int(line["scored"])
        for line in lines
        if line["end"] == TRAINED
    }


def doubled_episodes(
    lines: Iterable[Line], trained: Mapping[int, Mapping[str, int]], num_samples: int
) -> dict[str, int]:
    """Return the prompts with more samples in a batch than have a score, each with how many more;
    arguments as of `lost_episodes`."""
    scored = _scored(lines)
    return {
        f"{name} in step {step}": count - most
        for step, samples in sorted(trained.items())
        for name, count in samples.items()
        if count > (most := scored.get((step, name), num_samples))
    }


def failure_rewards(
    lines: Iterable[Line], archive: Iterable[Line], games: Games, *, may_post: bool
) -> list[str]:
    """Return a text for each sample with a reward that its turns do not explain.

    Args:
        lines: of the group log.
        archive: of groups with their texts.
        games: of the data set.
        may_post: an agent may have posted the reward: 0 or 1.
    """
    found = []
    for line in lines:
        ended = sum(one["end"] is not None for one in line.get("episodes", ()))
        if line["scored"] > ended:
            found += [f"{line['prompt_id']}: {line['scored']} scored, {ended} ended"]
    for group in archive:
        known = games.get((group["prompt"], group.get("ground_truth", "")), ())
        for number, response in enumerate(group.get("responses", ())):
            if why := _defect(response, group.get("ground_truth", ""), known, may_post=may_post):
                found.append(f"sample {number} of {group['prompt_id']}: {why}")
    return found


def _defect(
    response: Line, answer: str, games: Sequence[Mapping[str, int]], *, may_post: bool
) -> str:
    reward = response.get("reward")
    if reward is None:
        return ""
    if response.get("failure") or not response.get("episode_end"):
        return f"reward {reward} of a failure: {response.get('failure', 'it has no end')}"
    text = response["text"]
    possible = {compute_score(text, answer)["score"]}
    if may_post:
        possible.add(float(text.rstrip().endswith(f"Answer: {answer}")))
    if reward not in possible:
        return f"reward {reward} for {text[-40:]!r}, and {answer} is right"
    turns = response.get("turns", ())
    if not any(_is_played(turns, jars) for jars in games):
        return f"reward {reward}, and its turns are no game: {[one.get('read') for one in turns]}"
    return ""


def _is_played(turns: Sequence[Line], jars: Mapping[str, int]) -> bool:
    """Return whether what the policy read is what the tool says, in one conversation."""
    if not turns or turns[0].get("parent") is not None or turns[0].get("read"):
        return False
    for turn in turns[1:]:
        parent = turn.get("parent")
        if parent is None:
            return False
        calls = [_looked(call, jars) for call in _CALL.findall(turns[parent]["text"])]
        # What the tool says to a call that it cannot make is its own.
        read = turn.get("read", "")
        is_plain = len(calls) == 1 and calls[0] is not None and not read.startswith(_UNREADABLE)
        if not read or (is_plain and read != f"[tool] {calls[0]}"):
            return False
    return True


def _looked(call: str, jars: Mapping[str, int]) -> int | None:
    """Return the number that a call finds; None if it is no call of `look` for a jar."""
    with suppress(ValueError, LookupError, TypeError):
        made = json.loads(call)
        if made["name"] == "look" and set(made["arguments"]) == {"jar"}:
            return jars[made["arguments"]["jar"]]
    return None
