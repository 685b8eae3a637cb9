"""Convert prompts to token ids and back, with the model's tokenizer and chat template."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from services.rollout.continuation import TOOL, USER, Bridge, TemplateAccess
from services.rollout.engines.text import cut_at_stop
from services.rollout.tool_calls import PLAIN, marks_of, read_answer
from sluice.errors import ConfigError, InvalidRequestError, SluiceError
from sluice.types import IMAGE_MARK, Answer, ChatMessage, TokenIds, Tool
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_PROMPT_CHARACTERS = 2_000_000
OWN_ARGUMENTS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
    )
)
"""Template arguments that only the encoder sets."""
_MAX_BRIDGES = 16
NO_KWARGS: Mapping[str, object] = MappingProxyType({})


class PromptEncoder:
    """The model's tokenizer and chat template.

    Args:
        model_path: directory with the tokenizer.
        template_kwargs: further arguments of the chat template, such as ``enable_thinking``.
        trust_remote_code: run tokenizer code of the checkpoint.
        tool_format: how the policy writes tool calls; empty for the chat template's format.

    Raises:
        ConfigError: the directory holds no tokenizer, or `template_kwargs` names an argument that
            the encoder sets.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        template_kwargs: Mapping[str, object] = NO_KWARGS,
        trust_remote_code: bool = False,
        tool_format: str = "",
    ) -> None:
        self._model_path = model_path
        _refuse_reserved(template_kwargs, "data.apply_chat_template_kwargs", ConfigError)
        self._template_kwargs = dict(template_kwargs)
        self._tokenizer = _load_tokenizer(model_path, trust_remote_code=trust_remote_code)
        # The wrapper costs several times what the tokenizer itself does on short texts.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            # A tokenizer.json may cut and pad texts; prompts must be neither cut nor padded.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._images = _image_prompts(model_path, trust_remote_code=trust_remote_code)
        self._tool_format = tool_format
        self._end_tokens = _end_tokens(model_path)
        self._own_bridge = self._new_bridge(self._template_kwargs)
        self._bridges: OrderedDict[str, Bridge] = OrderedDict()  # by other arguments

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[bytes] = (),
        *,
        template_kwargs: Mapping[str, object] = NO_KWARGS,
        add_special_tokens: bool = False,
        tools: Sequence[Tool] = (),
    ) -> TokenIds:
        """Render the chat template with a generation prompt and tokenise the text: [prompt tokens].

        Args:
            messages: the turns. With images, ``<image>`` in their texts stands for one.
            images: encoded files in the order of these. Image tokens count like any others.
            template_kwargs: override the encoder's.
            add_special_tokens: add the tokenizer's special tokens (BOS, EOS), although the template
                writes its own.
            tools: the tools to show to the policy.

        Raises:
            InvalidRequestError: the template refuses the turns or an argument, or shows no tools;
                the images do not fit the model, the texts or the template; or one of them cannot be
                read.
        """
        self._check_size(_num_characters(messages, tools))
        arguments = self._template_arguments(template_kwargs)
        if tools:
            self._check_shown(arguments)
        if images:
            self._check_images(images)
        turn = _turn_with_images if images else _turn
        if any(lone := _lone_results(messages)) and not self._bridge(arguments).shows_lone_results:
            # They say why a call could not be read: the policy reads them as the user's.
            messages = [
                replace(message, role=USER, tool_call_id="") if is_lone else message
                for message, is_lone in zip(messages, lone, strict=True)
            ]
        text = self._render([turn(message) for message in messages], tools, arguments)
        ids = self._tokens(text, add_special_tokens=add_special_tokens)
        return self._images.expand(ids, images) if images and self._images else _to_token_ids(ids)

    def encode_continuation(
        self,
        earlier: TokenIds,
        messages: Sequence[ChatMessage],
        *,
        template_kwargs: Mapping[str, object] = NO_KWARGS,
        tools: Sequence[Tool] = (),
    ) -> TokenIds:
        """Return `earlier`, then the tokens of new turns and a generation prompt.

        Args:
            earlier: [tokens] of the conversation so far, with its last response; at least one.
            messages: turns of the roles ``user`` and ``tool``; none: nothing is added.
            template_kwargs: override the encoder's.
            tools: as in the prompt that the conversation began with.

        Raises:
            HistoryRewrittenError: the template writes earlier turns differently in history.
            InvalidRequestError: the template refuses the turns or an argument, or shows no tools.
        """
        self._check_size(_num_characters(messages, tools))
        arguments = self._template_arguments(template_kwargs)
        if not messages:
            return earlier
        if tools:
            self._check_shown(arguments)
        return self._bridge(arguments).extend_tokens(earlier, messages, tools)

    @property
    def tool_format(self) -> str:
        """The format in which the policy writes tool calls."""
        return self._tool_format or self._bridge(self._template_kwargs).tool_format

    def prove_continuations(self) -> str:
        """Prove on generated dialogues which conversations can be continued; return it as a line.

        This is for the run's arguments of the template; those of a request are proved with it.
        """
        bridge = self._bridge(self._template_kwargs)
        refused = [
            f"turns of {kind.role} after {'thoughts' if kind.thinks else 'text'} ({reason})"
            for kind, reason in bridge.refusals.items()
            if reason
        ]
        exact = "all conversations" if not refused else f"all but {', '.join(refused)}"
        return f"calls of tools are {self.tool_format}; tokens are continued of {exact}"

    def read_answer(
        self,
        token_ids: TokenIds,
        stops: Sequence[str] = (),
        *,
        tool_format: str = "",
        tools: Sequence[Tool] = (),
    ) -> Answer:
        """Parse a finished response into an answer.

        Args:
            token_ids: [tokens] of the response.
            stops: it ends before the first of these texts.
            tool_format: how calls of tools are written; empty: see the property of that name.
            tools: those that were offered.
        """
        marks = marks_of(self.tool_format if tool_format in ("", PLAIN) else tool_format)
        control = self._control_tokens
        ids = [
            id_ for id_ in token_ids.tolist() if control.get(id_) is None or control[id_] in marks
        ]
        text = cut_at_stop(self._decode_with_control(ids), stops)
        family = self.tool_format
        return read_answer(text, tool_format or family, tools, family=family)

    def _decode_with_control(self, ids: list[int]) -> str:
        """Return the text of tokens, with those that are special."""
        decoder = self._tokenizer if self._fast is None else self._fast
        return str(decoder.decode(ids, skip_special_tokens=False))

    @functools.cached_property
    def _control_tokens(self) -> Mapping[int, str]:
        """Texts of the tokenizer's special tokens, by id."""
        added = self._tokenizer.added_tokens_decoder
        return {number: token.content for number, token in added.items() if token.special}

    def _bridge(self, arguments: Mapping[str, Any]) -> Bridge:
        """Return the bridge for arguments of the template: the run's, or one of a few others."""
        if arguments == self._template_kwargs:
            return self._own_bridge
        key = json.dumps(arguments, sort_keys=True, default=str)
        # Threads call this, too: each step is safe, and a bridge that is made twice does no harm.
        bridge = self._bridges.pop(key, None) or self._new_bridge(arguments)
        self._bridges[key] = bridge
        while len(self._bridges) > _MAX_BRIDGES:
            self._bridges.popitem(last=False)
        return bridge

    def _new_bridge(self, arguments: Mapping[str, Any]) -> Bridge:
        return Bridge(
            TemplateAccess(
                lambda messages, tools: self._render(
                    [_turn(message) for message in messages], tools, arguments
                ),
                lambda text: self._tokens(text, add_special_tokens=False).tolist(),
                lambda ids: self._decode_with_control(ids.tolist()),
                self._control_tokens,
                self._end_tokens,
            )
        )

    def _check_shown(self, arguments: Mapping[str, Any]) -> None:
        if not self._bridge(arguments).shows_tools:
            raise InvalidRequestError(
                "tools: the model's chat template shows none; describe them in a message, or serve "
                "a model whose template does (actor_rollout_ref.model.path)"
            )

    def _check_images(self, images: Sequence[bytes]) -> None:
        if self._images is None:
            raise InvalidRequestError(
                f"images: {len(images)} for a model that reads only text; send none, or serve one "
                f"whose model_type is {', '.join(sorted(FAMILIES))} (actor_rollout_ref.model.path)"
            )

    def _template_arguments(self, row_arguments: Mapping[str, object]) -> dict[str, Any]:
        _refuse_reserved(row_arguments, "chat_template_kwargs", InvalidRequestError)
        return {**self._template_kwargs, **row_arguments}

    def _render(
        self,
        turns: list[dict[str, Any]],
        tools: Sequence[Tool],
        arguments: Mapping[str, Any],
    ) -> str:
        if tools:
            arguments = {**arguments, "tools": [_function(tool) for tool in tools]}
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **arguments
            )
        except Exception as error:
            if not self._tokenizer.chat_template:
                raise InvalidRequestError(
                    f"messages: the tokenizer in {self._model_path} has no chat template; save one "
                    "as chat_template.jinja there, or send plain text"
                ) from error
            raise InvalidRequestError(
                f"messages: the chat template refused them: {error}"
            ) from error
        return str(text)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Tokenise plain text: [prompt tokens].

        Args:
            text: what the response continues.
            add_special_tokens: add those that the tokenizer begins or ends texts with, such as a
                BOS, as transformers and other servers do by default.

        Raises:
            InvalidRequestError: it has no token, or too many characters.
        """
        return _to_token_ids(self._tokens(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of response tokens, without special tokens."""
        decoder = self._tokenizer if self._fast is None else self._fast
        return str(decoder.decode(token_ids.tolist(), skip_special_tokens=True))

    def _tokens(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        self._check_size(len(text))
        if self._fast is not None:
            ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def _check_size(self, num_characters: int) -> None:
        """Bound the input of rendering and tokenising, which block the event loop."""
        if num_characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"prompt: {num_characters} characters; send at most {MAX_PROMPT_CHARACTERS}"
            )


def _to_token_ids(ids: TokenIds) -> TokenIds:
    if ids.size == 0:
        raise InvalidRequestError("prompt: no tokens; send at least one")
    return ids


def _num_characters(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    of_turns = sum(
        len(message.role)
        + len(message.content)
        + len(message.reasoning)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in messages
    )
    of_tools = sum(len(t.name) + len(t.description) + len(t.parameters) for t in tools)
    return of_turns + of_tools


def _lone_results(messages: Sequence[ChatMessage]) -> list[bool]:
    """Return which turns are results that follow no call."""
    flags, called = list[bool](), False
    for message in messages:
        called = called if message.role == TOOL else bool(message.tool_calls)
        flags.append(message.role == TOOL and not called)
    return flags


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Return a turn as templates read it; they ask whether a key is there."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                # Templates write arguments as JSON, so that a text would be quoted twice.
                "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
        if not message.tool_calls or not message.content:  # gpt-oss takes one of the two
            turn["thinking"] = message.reasoning
    return turn


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = msgspec.json.decode(tool.parameters)
    return {"type": "function", "function": function}


def _end_tokens(model_path: Path) -> frozenset[int]:
    """Return the tokens that end a response, by the model's files."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = msgspec.json.decode((model_path / name).read_bytes())
            ids = config.get("eos_token_id")
        except (OSError, msgspec.DecodeError, AttributeError):
            continue
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _turn_with_images(message: ChatMessage) -> dict[str, Any]:
    """Return the text in parts, as templates of vision-language models expect it."""
    turn, texts = _turn(message), message.content.split(IMAGE_MARK)
    if len(texts) == 1:
        return turn
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**turn, "content": parts}


def _image_prompts(model_path: Path, *, trust_remote_code: bool) -> ImagePromptReader | None:
    if not (model_path / "config.json").is_file():
        return None  # only a tokenizer
    return load_image_prompts(model_path, trust_remote_code=trust_remote_code)


def _refuse_reserved(arguments: Mapping[str, object], field: str, error: type[SluiceError]) -> None:
    if reserved := sorted(OWN_ARGUMENTS & arguments.keys()):
        raise error(
            f"{field}: {', '.join(reserved)} cannot be set, since prompts are always rendered by "
            "the model's template as text that waits for an answer; leave it out"
        )


def _load_tokenizer(model_path: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {model_path} holds no tokenizer ({error}); "
            "point it at a Hugging Face model directory"
        ) from error
