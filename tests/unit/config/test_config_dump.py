"""What is written for the services is what was loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import dump_config, flat_settings, parse_document, write_config
from sluice.config.run import RunConfig, known_keys, value_at

_ABSENT = object()
WORDS = st.one_of(
    st.text(min_size=0, max_size=12).filter(lambda text: "${" not in text),
    st.sampled_from(["1e-6", "010", "0x1F", "null", "~", "true", "on", "12:30", "1_000", ".inf"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS)


@settings(max_examples=20)
@given(
    name=WORDS, lr=st.floats(min_value=1e-12, max_value=1e3), kwargs=st.dictionaries(WORDS, SCALARS)
)
def test_a_dumped_configuration_reads_back_equal(
    name: str, lr: float, kwargs: dict[str, object]
) -> None:
    base = msgspec.to_builtins(RunConfig())
    base["trainer"]["experiment_name"] = name
    base["actor_rollout_ref"]["actor"]["optim"]["lr"] = lr
    base["reward"]["custom_reward_function"]["reward_kwargs"] = kwargs
    config = msgspec.convert(base, RunConfig)
    assert msgspec.convert(parse_document(dump_config(config), "dump"), RunConfig) == config


def test_the_written_file_loads_equal_and_no_partial_file_stays(tmp_path: Path) -> None:
    config = load_config(None, ["data.train_batch_size=64", "actor_rollout_ref.rollout.n=8"])
    path = tmp_path / "runs" / "config.yaml"
    write_config(config, path)
    assert load_config(path, []) == config
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]


def test_the_dump_writes_out_every_key_of_the_schema() -> None:
    dumped = parse_document(dump_config(RunConfig()), "dump")
    assert isinstance(dumped, dict)
    assert all(value_at(dumped, key.split("."), _ABSENT) is not _ABSENT for key in known_keys())


def test_loading_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "import sluice.config.loading.loader, sluice.config.rules.checks, "
        "sluice.config.loading.yaml_text\n"
        "from sluice.config.rules import checks\n"
        "from sluice.config.loading import loader\n"
        "checks.relation_problems(loader.load_config(None, []))\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'grpc', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_are_listed_by_their_dotted_keys() -> None:
    settings = flat_settings(RunConfig())
    assert settings["data.train_batch_size"] == RunConfig().data.train_batch_size
    assert settings["trainer.logger"] == list(RunConfig().trainer.logger)
    assert not any(isinstance(value, dict) and value for value in settings.values())
