"""Fields of OpenAI's and other servers' dialects that would change the answer, and are not offered.

What is ignored in silence makes another answer than the one asked for, and so a wrong score. Each
of these is refused, unless it has a value with which it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from sluice.codec.field_rules import shortened
from sluice.openai_front.refusals import RefusedError

Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class _Unoffered:
    """`neutral`: values beside null that say nothing, the one to name first. `remedy`: instead."""

    neutral: tuple[object, ...] = ()
    remedy: str = ""


_FALSE, _TRUE = _Unoffered((False,)), _Unoffered((True,))
_ZERO, _ONE = _Unoffered((0,)), _Unoffered((1,))
_NOTHING, _EMPTY_LIST, _EMPTY_OBJECT = _Unoffered(), _Unoffered(([],)), _Unoffered(({},))
_TEMPLATE = "set chat_template_kwargs as the model's template has it"
_THINKING = _Unoffered(remedy=_TEMPLATE)
_OF_PROMPTS = "logprobs of prompts are not known"
_TOOLS = _Unoffered(([],), "functions are not called; describe them in a message")
_TOOL_CHOICE = _Unoffered(("none", "auto"), "functions are not called")

_OF_BOTH = {
    # how tokens are drawn
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), _ZERO),
    **dict.fromkeys(("min_tokens", "min_length"), _ZERO),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "num_beams", "typical_p"), _ONE),
    **dict.fromkeys(("tfs", "tfs_z", "encoder_repetition_penalty", "guidance_scale"), _ONE),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), _ZERO),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability"), _ZERO),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "penalty_alpha", "top_n_sigma"), _ZERO),
    **dict.fromkeys(("use_beam_search", "early_stopping"), _FALSE),
    "do_sample": _Unoffered((True,), "send temperature 0 for the most probable tokens"),
    "max_new_tokens": _Unoffered(remedy="send max_tokens"),
    "max_length": _Unoffered(remedy="send max_tokens"),
    "logit_bias": _EMPTY_OBJECT,
    "vllm_xargs": _EMPTY_OBJECT,
    "custom_params": _EMPTY_OBJECT,
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), _EMPTY_LIST),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_ids"), _EMPTY_LIST),
    **dict.fromkeys(("lora_path", "lora_request"), _NOTHING),
    # what an answer may look like
    "response_format": _Unoffered(({"type": "text"}, {}), "only text is offered"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NOTHING),
    **dict.fromkeys(("structured_outputs", "structural_tag", "grammar", "ebnf", "regex"), _NOTHING),
    **dict.fromkeys(("json_schema", "json_object", "stop_regex"), _NOTHING),
    # what of it is told, and how
    "include_stop_str_in_output": _FALSE,
    "no_stop_trim": _FALSE,
    "skip_special_tokens": _TRUE,
    "return_tokens_as_token_ids": _Unoffered((False,), "send return_token_ids"),
    "top_logprobs": _Unoffered((0,), "only the drawn token's logprob is known"),
    "echo": _Unoffered((False,), _OF_PROMPTS),
    "prompt_logprobs": _Unoffered(remedy=_OF_PROMPTS),
    "suffix": _Unoffered(("",), "only continuing is offered"),
    # what the model reads
    "truncate_prompt_tokens": _Unoffered(remedy="prompts are never cut; send a shorter one"),
    "mm_processor_kwargs": _EMPTY_OBJECT,
}
_OF_CHAT = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_choice": _TOOL_CHOICE,
    "function_call": _TOOL_CHOICE,
    "documents": _Unoffered(([],), "write them into a message"),
    "chat_template": _Unoffered(remedy="the model's own renders the messages"),
    "add_generation_prompt": _TRUE,
    "continue_final_message": _Unoffered((False,), "render the text, and send it as a completion"),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "thinking"), _THINKING),
    **dict.fromkeys(("thinking_budget", "reasoning"), _THINKING),
    "include_reasoning": _Unoffered((True,), "an answer is told whole, with what was thought"),
    "separate_reasoning": _Unoffered((False,), "an answer is told whole, with what was thought"),
    "modalities": _Unoffered((["text"],), "only text is offered"),
    "audio": _Unoffered(remedy="only text is offered"),
    "verbosity": _Unoffered(("medium",), "ask for it in a message"),
    "web_search_options": _NOTHING,
}
_OF_COMPLETION = {
    "prompt_embeds": _Unoffered(remedy="send the prompt as a text or as token ids"),
    "chat_template_kwargs": _Unoffered(({},), "ask /v1/chat/completions, which has a template"),
    "max_completion_tokens": _Unoffered(remedy="send max_tokens"),
}

UNOFFERED: Mapping[Kind, Mapping[str, _Unoffered]] = MappingProxyType(
    {"chat": {**_OF_BOTH, **_OF_CHAT}, "completion": {**_OF_BOTH, **_OF_COMPLETION}}
)


def check_unoffered(body: bytes, kind: Kind) -> None:
    """Refuses a body with a field that would change the answer, and cannot.

    Args:
        body: a JSON object.

    Raises:
        RefusedError: names the field, its value and the remedy.
    """
    for field, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        known = UNOFFERED[kind].get(field)
        if known is None:
            continue
        value = msgspec.json.decode(raw)
        if value is not None and value not in known.neutral:
            raise RefusedError(_refusal(field, value, known), field)


def _refusal(field: str, value: object, known: _Unoffered) -> str:
    remedy = "leave it out"
    if known.neutral:
        remedy = f"send {msgspec.json.encode(known.neutral[0]).decode()}, or {remedy}"
    reason = f" ({known.remedy})" if known.remedy else ""
    return f"{field}: {shortened(value)} is not offered{reason}; {remedy}"
