"""A replica as its process puts it together, with a real engine and a tokenizer of words.

The word ``w7`` is token 7, and texts begin with the token `BOS`, as of Llama's and Gemma's
tokenizers. The chat template joins the turns; ``think: false`` among its arguments adds ``w9``,
``steps`` so many ``w8``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from services.rollout.__main__ import _encoder, _server
from services.rollout.servicer import ReplicaIdentity
from sluice.config.loading.loader import load_config
from sluice.quickstart.tokenizer import save_tokenizer
from sluice.rpc.credentials import OPEN
from tests.support.causal_lms import EOS, VOCABULARY, reference_model, running_engine, save_config

BOS = VOCABULARY - 1
MAX_PROMPT_LENGTH, MAX_MODEL_LEN = 8, 32
_BOS_TEXT, _END_TEXT = "<s>", "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% for step in range(steps | default(0)) %} w8{% endfor %}"
    "{% if think is defined and think is false %} w9{% endif %}"
)


DIALOGUE = (
    "{% for message in messages %}"
    "{{ 'w2 ' if message['role'] == 'assistant' else 'w1 ' }}{{ message['content'] }}<|im_end|> "
    "{% endfor %}w2 "
)
"""A template whose answers end with the token `EOS`."""


def words(*tokens: int) -> str:
    """A text of these tokens."""
    return " ".join(f"w{token}" for token in tokens)


@asynccontextmanager
async def word_replica(
    folder: Path, *settings: str, template: str = _TEMPLATE, max_model_len: int = MAX_MODEL_LEN
) -> AsyncIterator[str]:
    """The address of a replica whose training prompts may have `MAX_PROMPT_LENGTH` tokens."""
    save_config("qwen3", folder)
    _save_words(folder, template, max_model_len)
    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={folder}",
            f"data.max_prompt_length={MAX_PROMPT_LENGTH}",
            f"data.max_response_length={max_model_len - MAX_PROMPT_LENGTH}",
            "sluice.rollout.endpoint.host=127.0.0.1",
            "sluice.rollout.endpoint.port=0",
            *settings,
        ],
    )
    model = reference_model(folder)
    async with running_engine(folder, model, max_model_len=max_model_len) as engine:
        identity = ReplicaIdentity("rollout-0", "one")
        server = _server(config, engine, _encoder(config), identity, OPEN)
        await server.start()
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


def _save_words(folder: Path, template: str, max_model_len: int) -> None:
    vocabulary = {f"w{token}": token for token in range(BOS)} | {_BOS_TEXT: BOS}
    if _END_TEXT in template:
        del vocabulary[f"w{EOS}"]
        vocabulary[_END_TEXT] = EOS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens([text for text in (_BOS_TEXT, _END_TEXT) if text in vocabulary])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS_TEXT} $A", special_tokens=[(_BOS_TEXT, BOS)]
    )
    save_tokenizer(tokenizer, folder, max_model_len, template)
