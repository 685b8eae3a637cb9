"""Chat templates in the manner of model families: short ones that behave as theirs do.

Each has a tokenizer with its family's control tokens. `save_family` writes a folder as of a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from sluice.quickstart.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_on_texts

_TOOLS_IN_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
# Results that follow each other are one turn of the user.
_TOOL_TURN = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
)
_HERMES_CALLS = (
    "{%- for call in message.tool_calls %}"
    "{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"

QWEN25 = (
    _TOOLS_IN_SYSTEM + "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'system' %}"
    "{%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + content }}"
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _TOOL_TURN
    + _CHATML_PROMPT
    + "{%- endif %}"
)

_XML_CALLS = (
    "{%- for call in message.tool_calls %}"
    "{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<parameter=' + key + '>\\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}"
)
QWEN3_CODER = QWEN25.replace(_HERMES_CALLS, _XML_CALLS)

# Thoughts before the last question are left out; without thinking, the prompt has empty ones.
QWEN3 = (
    _TOOLS_IN_SYSTEM + "{%- set last = namespace(question=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'system' %}"
    "{%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set thoughts = message.reasoning_content | default('', true) %}"
    "{%- if '</think>' in content %}"
    "{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > last.question and (loop.last or thoughts) %}"
    "{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}"
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _TOOL_TURN
    + _CHATML_PROMPT
    + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)

# Texts are trimmed; a call is the whole answer, and there is one at most.
LLAMA3 = (
    "{{- '<|begin_of_text|>' }}"
    "{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions:' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}"
    "{%- endif %}{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + call.name }}'
    "{{- '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim }}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

# The end token swallows the newline after it; roles it does not know are left out.
PHI = (
    "{%- for message in messages %}"
    "{%- if message.role in ['system', 'user', 'assistant'] %}"
    "{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)

# No system, strict alternation, no tools.
GEMMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)

# Of no family: what templates do that no bridge can continue.
REVERSED = (
    "{%- for message in messages | reverse %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
COUNTED = "{{- messages | length }}" + CHAT_TEMPLATE
NO_END = (
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)
# Calls in no format that is read here, with an end token of their own.
OTHER_CALLS = (
    "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- 'to=' + call.function.name }}{{- call.function.arguments | tojson }}{%- endfor %}"
    "{{- '<|call|>' }}{%- else %}{{- '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# The next role ends an answer: a user's after text, the tools' after calls.
GLM = (
    "{%- if tools %}{{- '<|system|>\\n' }}{{- tools | tojson }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}"
    "{%- for call in message.tool_calls %}{{- '<tool_call>' + call.function.name + '\\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
# A result is written with the id of its call.
KIMI = (
    "{%- if tools %}{{- '<|im_system|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_' + message.role + '|>' }}"
    "{%- if message.role == 'tool' %}{{- '## Return of ' }}"
    "{{- message.tool_call_id }}{{- '\\n' }}{%- endif %}{{- message.content }}"
    "{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    "{%- for call in message.tool_calls %}{{- '<|tool_call_begin|>' + call.id }}"
    "{{- '<|tool_call_argument_begin|>' }}{{- call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>' }}{%- endif %}"
)
_PARAMETERS = (
    "{%- for key, value in call.function.arguments.items() %}{{- KEY + '\"' }}{{- TYPE }}{{- '>' }}"
    "{{- value if value is string else value | tojson }}{{- END }}{%- endfor %}"
)
_INVOKED = (
    "{%- if message.tool_calls %}{{- BLOCK }}{%- for call in message.tool_calls %}"
    "{{- CALL + call.function.name + '\">\\n' }}PARAMETERS{{- ENDCALL }}{%- endfor %}"
    "{{- ENDBLOCK }}{%- endif %}"
)


def _invoking(begin: str, block: str, value_type: str) -> str:
    """A template that writes calls with invoke and parameter, which `begin` stands before."""
    parts = {
        "PARAMETERS": _PARAMETERS,
        "KEY": f"'<{begin}parameter name=\"' + key",
        "TYPE": value_type,
        "ENDBLOCK": f"'</{block}>'",
        "ENDCALL": f"'</{begin}invoke>\\n'",
        "END": f"'</{begin}parameter>\\n'",
        "BLOCK": f"'<{block}>\\n'",
        "CALL": f"'<{begin}invoke name=\"'",
    }
    calls = _INVOKED
    for part, written in parts.items():
        calls = calls.replace(part, written)
    return QWEN25.replace(_HERMES_CALLS, calls)


MINIMAX = _invoking("", "minimax:tool_call", "''")
DEEPSEEK_V4 = _invoking(
    "｜DSML｜",
    "｜DSML｜tool_calls",
    "' string=\"' + ('true' if value is string else 'false') + '\"'",
)
SEED = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace("key + '>\\n'", "key + '>'")
    .replace("'\\n</parameter>", "'</parameter>")
    .replace(
        "assistant\\n' + content",
        "assistant\\n' }}{%- if message.reasoning_content %}{{- '<seed:think>' }}"
        "{{- message.reasoning_content + '</seed:think>' }}{%- endif %}{{- content",
    )
)

# Results follow their calls in one turn, and have the names of those with their ids; lone ones are
# left out.
GEMMA4 = (
    "{%- for tool in tools or [] %}{{- '<|tool>' }}{{- tool | tojson }}{{- '<tool|>' }}"
    "{%- endfor %}{%- set last = namespace(calls=[]) %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}{%- if last.calls %}"
    "{%- set last.name = none %}{%- for call in last.calls %}"
    "{%- if call.id == message.tool_call_id %}{%- set last.name = call.function.name %}"
    "{%- endif %}{%- endfor %}"
    "{{- '<|tool_response>response:' + last.name + '{value:<|\"|>' + message.content }}"
    "{{- '<|\"|>}<tool_response|>' }}{%- endif %}"
    "{%- else %}{%- set last.calls = message.tool_calls %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|turn>' + message.role + '\\n' }}{%- endif %}{{- message.content }}"
    "{%- for call in message.tool_calls %}{{- '<|tool_call>call:' + call.function.name + '{' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- key + ':<|\"|>' + value + '<|\"|>' }}{%- endfor %}{{- '}<tool_call|>' }}{%- endfor %}"
    "{%- if not message.tool_calls %}{{- '<turn|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{- '<|turn>assistant\\n' }}{%- endif %}"
)
# One call in an answer, whose name the result has; a lone result is refused.
GPT_OSS = (
    "{%- if tools %}{{- '<|start|>developer<|message|>' }}{{- tools | tojson }}{{- '<|end|>' }}"
    "{%- endif %}{%- set last = namespace(call='') %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    "{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' }}"
    "{{- message.thinking + '<|end|>' }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{%- set last.call = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name }}"
    "{{- '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}{{- '<|call|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if not last.call %}{{- raise_exception('a result without a call') }}{%- endif %}"
    "{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content | tojson }}{{- '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role }}"
    "{{- '<|channel|>final' if message.role == 'assistant' }}{{- '<|message|>' + message.content }}"
    "{{- '<|end|>' }}{%- set last.call = '' %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# A result has the name of the call before it.
NAMED_RESULTS = QWEN25.replace(
    "'\\n<tool_response>\\n' + message.content",
    "'\\n' + messages[loop.index0 - 1].tool_calls[0].function.name + message.content",
)


@dataclass(frozen=True)
class Family:
    """A template, its control tokens (the end token first), and further tokens that are text.

    Args:
        call_end: the token that ends an answer with calls, if it is another.
    """

    template: str
    control: tuple[str, ...]
    marks: tuple[str, ...] = ()
    end_strips: bool = False
    call_end: str = ""


_CHATML = ("<|im_end|>", "<|im_start|>")
_QWEN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, _QWEN_MARKS[:2]),
    "qwen3": Family(QWEN3, _CHATML, _QWEN_MARKS),
    "qwen3_coder": Family(QWEN3_CODER, _CHATML, _QWEN_MARKS),
    "llama3": Family(
        LLAMA3,
        (
            "<|eot_id|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
        ),
    ),
    "glm": Family(
        GLM,
        ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call_end="<|observation|>",
    ),
    "kimi": Family(
        KIMI,
        (
            *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_tool|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "minimax": Family(MINIMAX, _CHATML, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "seed": Family(
        SEED,
        (
            *(*_CHATML, "<seed:tool_call>", "</seed:tool_call>"),
            *("<seed:think>", "</seed:think>"),
        ),
    ),
    "deepseek_v4": Family(DEEPSEEK_V4, (*_CHATML, "｜DSML｜")),
    "gemma4": Family(
        GEMMA4,
        (
            *("<turn|>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
            *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>"),
        ),
        call_end="<|tool_response>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        (
            *("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"),
            "<|constrain|>",
        ),
        call_end="<|call|>",
    ),
    "phi": Family(PHI, ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>"), end_strips=True),
    "gemma": Family(GEMMA, ("<end_of_turn>", "<start_of_turn>")),
    "chatml": Family(CHAT_TEMPLATE, _CHATML),
    "reversed": Family(REVERSED, _CHATML),
    "counted": Family(COUNTED, _CHATML),
    "other calls": Family(OTHER_CALLS, (*_CHATML, "<|call|>")),
    "other calls, one end": Family(OTHER_CALLS.replace("<|call|>", "<|im_end|>"), _CHATML),
    "named results": Family(NAMED_RESULTS, _CHATML),
    "no end": Family(NO_END, _CHATML),
}


@cache
def _tokens_of_bytes() -> str:
    return train_on_texts(["result 7 of jar 12\n\n" * 9]).to_str()


def save_family(name: str, folder: Path) -> Path:
    """Write a tokenizer with a family's template and control tokens."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_tokens_of_bytes())
    end, *others = family.control
    tokenizer.add_special_tokens([AddedToken(end, rstrip=family.end_strips), *others])
    tokenizer.add_tokens(list(family.marks))
    save_tokenizer(tokenizer, folder, 4096, family.template)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"eos_token": end}
    file.write_text(json.dumps(settings), encoding="utf-8")
    return folder
