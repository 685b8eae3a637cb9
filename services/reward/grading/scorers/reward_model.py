"""Use a reward model behind HTTP as a scorer: send a question, read one number, refuse any other
reply.

It runs in a scorer process like any scorer, so a hanging connection ends with the process at the
latest. It calls OpenAI's chat completions, which vLLM, SGLang and others serve.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping

import msgspec

from sluice.concurrency.bounded_http import Endpoint, HttpFault, endpoint, post_until
from sluice.config.schema.reward import RewardModelConfig
from sluice.errors import ConfigError, DataError, PeerError
from sluice.json_objects import DECODE_ERRORS

KEY = "reward.reward_model"
PEER = "reward model"
DEFAULT_TEMPLATE = (
    "Grade the response against the reference answer. Reply with one number from 0 (wrong) to 1 "
    "(right) and nothing else.\n\nQuestion:\n{question}\n\nReference answer:\n{ground_truth}\n\n"
    "Response:\n{response}\n\nGrade:"
)
LAST_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
MAX_RESPONSE_BYTES = 2**20
FIRST_PAUSE_S = 0.2
BUDGET_SHARE = 0.9

_PLACEHOLDER = re.compile(r"\{(question|response|ground_truth|data_source|extra_info\.[^{}]+)\}")
_EXTRA_INFO = "extra_info."


class _Message(msgspec.Struct):
    content: str


class _ChatChoice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_ChatChoice]


class RewardModelScorer:
    """Grades a response by a model's reply.

    The last match of `score_pattern` in the reply counts (its first group, if it has one). A number
    outside `min_score`..`max_score` is refused. In the template, only the placeholders of
    `fill_template` are replaced; other braces stay.

    Args:
        settings: address, name and question of the model.
        item_timeout_s: wall-clock limit of one sample; all attempts fit into 90% of it.

    Raises:
        ConfigError: a setting is invalid; the error names its key.
    """

    def __init__(self, settings: RewardModelConfig, item_timeout_s: float) -> None:
        if not settings.min_score < settings.max_score:
            raise ConfigError(
                f"{KEY}.min_score = {settings.min_score:g} must be less than max_score = "
                f"{settings.max_score:g}"
            )
        self._settings, self._budget_s = settings, BUDGET_SHARE * item_timeout_s
        self._endpoint = _completions_endpoint(settings)
        self._pattern = _pattern(settings.score_pattern or LAST_NUMBER)
        self._headers = {"Content-Type": "application/json", **_authorization(settings)}

    def __call__(self, *, solution_str: str, question: str = "", **call: object) -> float:
        """Return the model's number for one response.

        Raises:
            PeerError: the model gave no usable answer in time.
            DataError: the template names a key that the row lacks.
        """
        values = {**call, "response": solution_str, "question": question}
        prompt = fill_template(self._settings.prompt_template or DEFAULT_TEMPLATE, values)
        reply = self._ask(msgspec.json.encode(self._request(prompt)))
        return parse_score(reply, self._pattern, self._settings)

    def _request(self, prompt: str) -> Mapping[str, object]:
        return {
            "model": self._settings.model_path,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_tokens,
        }

    def _ask(self, body: bytes) -> str:
        try:
            answer = post_until(
                time.monotonic() + self._budget_s,
                self._endpoint,
                body,
                self._headers,
                attempts=self._settings.max_attempts,
                first_pause_s=FIRST_PAUSE_S,
                timeout_s=self._settings.request_timeout_s,
                max_response_bytes=MAX_RESPONSE_BYTES,
            )
        except HttpFault as fault:
            raise PeerError(PEER, "grading", str(fault)) from fault
        return _content(answer)


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """Return `template` with its placeholders replaced, once: inserted text is not replaced again.

    They are ``{question}``, ``{response}``, ``{ground_truth}``, ``{data_source}`` and
    ``{extra_info.KEY}``.

    Raises:
        DataError: the row lacks the KEY of a ``{extra_info.KEY}``.
    """

    def value(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if not name.startswith(_EXTRA_INFO):
            return str(values[name])
        extra_info = values["extra_info"]
        key = name.removeprefix(_EXTRA_INFO)
        if not isinstance(extra_info, Mapping) or key not in extra_info:
            raise DataError(
                f"{KEY}.prompt_template uses {{{name}}}, which the row lacks; add it to the "
                "data or take it out of the template"
            )
        return str(extra_info[key])

    return _PLACEHOLDER.sub(value, template)


def parse_score(reply: str, pattern: re.Pattern[str], settings: RewardModelConfig) -> float:
    """Return the last number that `pattern` finds.

    Raises:
        PeerError: there is none, it is not finite, or it is out of bounds.
    """
    match = None
    for match in pattern.finditer(reply):  # noqa: B007  the last one counts
        pass
    if match is None:
        raise PeerError(PEER, "grading", f"no number in its reply {reply!r:.200}")
    text = match[1] if pattern.groups else match[0]
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not settings.min_score <= number <= settings.max_score:
        raise PeerError(
            PEER,
            "grading",
            f"{text!r:.50} in its reply {reply!r:.200} is no number from {settings.min_score:g} to "
            f"{settings.max_score:g}",
        )
    return number


def _content(answer: bytes) -> str:
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except DECODE_ERRORS as error:
        raise PeerError(PEER, "grading", f"no chat completion: {error}: {answer!r:.200}") from error
    if not completion.choices:
        raise PeerError(PEER, "grading", "a chat completion without choices")
    return completion.choices[0].message.content


def _completions_endpoint(settings: RewardModelConfig) -> Endpoint:
    if not settings.base_url or not settings.model_path:
        missing_key = "base_url" if not settings.base_url else "model_path"
        raise ConfigError(
            f"{KEY}.{missing_key} is not set although {KEY}.enable is true; set it, or turn the "
            "reward model off"
        )
    base = endpoint(settings.base_url, key=f"{KEY}.base_url")
    return base._replace(path=base.path.rstrip("/") + "/chat/completions")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{KEY}.score_pattern = {text!r} is no regular expression: {error}"
        ) from error


def _authorization(settings: RewardModelConfig) -> Mapping[str, str]:
    if settings.api_key_env is None:
        return {}
    key = os.environ.get(settings.api_key_env)
    if not key:
        raise ConfigError(
            f"{KEY}.api_key_env = {settings.api_key_env!r}: this environment variable is not set; "
            "set it where the reward service runs"
        )
    return {"Authorization": f"Bearer {key}"}
