"""The loader: file, overrides, references, names and types."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.override_values import format_override_value
from sluice.config.loading.overrides import parse_override
from sluice.config.run import RunConfig
from sluice.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_file_and_overrides_the_defaults_stand() -> None:
    assert load_config(None, []) == RunConfig()


def test_a_file_sets_keys_and_leaves_the_others_at_their_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "data:\n  train_batch_size: 64\nalgorithm:\n")
    config = load_config(path, [])
    assert config.data.train_batch_size == 64
    assert config.algorithm == RunConfig().algorithm


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n"), []) == RunConfig()


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train_batch_size: 64}\n")
    config = load_config(path, ["data.train_batch_size=8", "data.train_batch_size=16"])
    assert config.data.train_batch_size == 16


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-06", "0.000001", ".000001"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, f"actor_rollout_ref: {{actor: {{optim: {{lr: {written}}}}}}}\n")
    assert load_config(path, []).actor_rollout_ref.actor.optim.lr == 1e-6
    override = f"actor_rollout_ref.actor.optim.lr={written}"
    assert load_config(None, [override]).actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize(
    "name", ["12:30", "2026-01-02", "on", "no", "a: b", "v1 # two", "%x", "a=b"]
)
def test_words_that_yaml_1_1_would_bend_stay_strings_in_overrides(name: str) -> None:
    config = load_config(None, [f"trainer.experiment_name={name}"])
    assert config.trainer.experiment_name == name


@pytest.mark.parametrize("name", ["12:30", "2026-01-02", "on", "no"])
def test_words_that_yaml_1_1_would_bend_stay_strings_in_files(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, f"trainer:\n  experiment_name: {name}\n")
    assert load_config(path, []).trainer.experiment_name == name


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.logger=['console','tensorboard']", ["console", "tensorboard"]),
        ('trainer.logger=["jsonl"]', ["jsonl"]),
        ("trainer.logger=[]", []),
    ],
)
def test_lists_are_read_in_either_kind_of_quotes(override: str, expected: list[str]) -> None:
    assert load_config(None, [override]).trainer.logger == expected


def test_null_true_and_false_are_literals() -> None:
    config = load_config(None, ["data.seed=null", "data.shuffle=False", "trainer.device=null"])
    assert (config.data.seed, config.data.shuffle, config.trainer.device) == (None, False, None)


def test_quotes_keep_a_word_a_string_and_nothing_is_the_empty_string() -> None:
    config = load_config(None, ["trainer.experiment_name='1e-6'", "trainer.project_name="])
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("1e-6", "")


def test_plus_adds_where_nothing_was_set_and_refuses_where_a_value_was() -> None:
    assert load_config(None, ["+data.seed=3"]).data.seed == 3
    # Older versions of verl lack the key, so that their users write +.
    assert load_config(
        None, ["+algorithm.filter_groups.enable=true"]
    ).algorithm.filter_groups.enable
    free = "reward.custom_reward_function.reward_kwargs"
    config = load_config(None, [f"+{free}.strict=true", f"{free}.depth=2"])
    kwargs = config.reward.custom_reward_function.reward_kwargs
    assert kwargs == {"strict": True, "depth": 2}
    with pytest.raises(ConfigError, match=r"data.train_batch_size has the value 512 already"):
        load_config(None, ["data.train_batch_size=512", "+data.train_batch_size=3"])


def test_plus_replaces_a_value_by_a_list_and_two_plus_replace_anything() -> None:
    config = load_config(None, ["+trainer.logger=[jsonl]", "++data.train_batch_size=3"])
    assert (config.trainer.logger, config.data.train_batch_size) == (["jsonl"], 3)


def test_tilde_takes_a_value_back_to_its_default(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train_batch_size: 64, seed: 5}\n")
    config = load_config(path, ["~data.train_batch_size", "~data.seed=5"])
    assert (config.data.train_batch_size, config.data.seed) == (1024, None)
    with pytest.raises(ConfigError, match="the value is 64, so nothing was removed"):
        load_config(path, ["~data.train_batch_size=65"])


def test_a_reference_takes_the_type_of_what_it_names() -> None:
    config = load_config(
        None,
        [
            "data.train_batch_size=48",
            "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
            "trainer.experiment_name=b${data.train_batch_size}-r${data.max_response_length}",
        ],
    )
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 48
    assert config.trainer.experiment_name == "b48-r512"


def test_references_follow_references_and_refuse_circles() -> None:
    config = load_config(
        None, ["data.seed=${trainer.seed}", "trainer.seed=${actor_rollout_ref.rollout.seed}"]
    )
    assert config.data.seed == 0
    with pytest.raises(ConfigError, match=r"circle: data.seed -> trainer.seed -> data.seed"):
        load_config(None, ["data.seed=${trainer.seed}", "trainer.seed=${data.seed}"])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("${data.promt_key}", r"reference \$\{data.promt_key\}.*did you mean data.prompt_key\?"),
        ("${now:%Y}", "calls a resolver"),
        (
            "${trainer.default_local_dir}/x",
            r"\$\{trainer.default_local_dir\}: that key has no value",
        ),
        ("${oc.env:NOT_THERE}", r"\$NOT_THERE has no value; set it: NOT_THERE=... sluice ..."),
    ],
)
def test_a_reference_to_nothing_is_refused(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"trainer.project_name={reference}"])


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("${oc.env:HERE}", "7"),
        ("run-${oc.env: HERE ,x}", "run-7"),
        ("${oc.env:GONE,a b}", "a b"),
        ("${oc.env:GONE,'a,b'}", "a,b"),
        ("${oc.env:GONE,${oc.env:HERE}/data}", "7/data"),
        ("${oc.env:HERE,${trainer.default_local_dir}}/data", "7/data"),
        ("${oc.env:EMPTY,x}", ""),
        ("${oc.env:GONE,}", ""),
    ],
)
def test_a_variable_of_the_environment_is_its_text_or_the_fallback(
    reference: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "7")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("GONE", raising=False)
    config = load_config(None, [f"trainer.experiment_name={reference}"])
    assert config.trainer.experiment_name == value


def test_a_text_of_the_environment_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH", "48")
    overrides = [
        "data.train_batch_size=${oc.decode:${oc.env:BATCH,1}}",
        "trainer.logger=${oc.decode:${oc.env:GONE,'[console, jsonl]'}}",
        "trainer.total_training_steps=${oc.decode:${oc.env:GONE,null}}",
    ]
    config = load_config(None, overrides)
    assert config.data.train_batch_size == 48
    assert config.trainer.logger == ["console", "jsonl"]
    assert config.trainer.total_training_steps is None
    with pytest.raises(ConfigError, match=r"train_batch_size = '48': expected an integer"):
        load_config(None, ["data.train_batch_size=${oc.env:BATCH}"])


@pytest.mark.parametrize("text", ["${oc.env:HERE}", "${data.prompt_key}", "{x", "${"])
def test_a_variable_that_looks_like_a_reference_is_text(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", text)
    config = load_config(
        None,
        [
            "trainer.experiment_name=${oc.env:HERE}",
            "trainer.project_name=<${trainer.experiment_name}>",
        ],
    )
    assert config.trainer.experiment_name == text
    assert config.trainer.project_name == f"<{text}>"


def test_a_mapping_in_a_variable_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", '{"enable_thinking": false}')
    config = load_config(None, ["data.apply_chat_template_kwargs=${oc.decode:${oc.env:HERE}}"])
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_a_reference_in_a_section_without_effect_is_no_problem(tmp_path: Path) -> None:
    text = "hydra: {run: {dir: 'outputs/${now:%Y}'}}\nray_kwargs: {a: '${oc.env:NOT_THERE}'}\n"
    load_config(write(tmp_path, text), ["hydra.job.name=${hydra:job.id}"])


def test_a_key_of_the_users_own_to_which_others_refer_is_a_variable(tmp_path: Path) -> None:
    text = "batch: 8\nmy: {length: 64}\ndata:\n  train_batch_size: ${batch}\n"
    file = write(tmp_path, f"{text}  max_prompt_length: ${{my.length}}\n")
    data = load_config(file, ["my.length=32", "++batch=16"]).data
    assert (data.train_batch_size, data.max_prompt_length) == (16, 32)
    of_all = "my: {length: 64, inner: {a: 1}}\nreward: {custom_reward_function: {reward_kwargs: "
    reward = load_config(write(tmp_path, of_all + "'${my}'}}"), []).reward
    kwargs = reward.custom_reward_function.reward_kwargs
    assert kwargs == {"length": 64, "inner": {"a": 1}}
    with pytest.raises(ConfigError, match="my: unknown key"):
        load_config(write(tmp_path, text), [])
    with pytest.raises(ConfigError, match="2 problems"):
        load_config(write(tmp_path, "sed: 1"), ["seed=2"])


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("data.train_batch_szie=8", r"did you mean data.train_batch_size\?"),
        ("rollout.top_p=1", r"did you mean actor_rollout_ref.rollout.top_p\?"),
        ("actor_rollout_ref.actor.lr=1", r"did you mean actor_rollout_ref.actor.optim.lr\?"),
        ("critic.optim.learning_rate=1", r"did you mean critic.optim.lr\?"),
        ("learning_rate=1", "did you mean actor_rollout_ref.actor.optim.lr or critic"),
        ("actor_rollout_ref.actor.learning_rate=1", "mean actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temp=1", "mean actor_rollout_ref.rollout.temperature"),
        ("trainer.n_gpus=8", r"did you mean trainer.n_gpus_per_node\?"),
        ("nothing.at.all=1", "nothing: unknown key; the root knows data, actor_rollout_ref"),
        ("data.seed.rows=1", "data.seed is a value and has no keys below it"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_probably_meant(
    override: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError, match=suggestion):
        load_config(None, [override])


def test_everything_wrong_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    text = "data: {train_batch_size: many, shuffle: yes, sed: 1}\ntrainer: {logger: [nowhere]}\n"
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text), [])
    message = str(raised.value)
    assert "run.yaml" in message
    assert "4 problems" in message
    assert "data.train_batch_size = many: expected an integer >= 1" in message
    assert "data.shuffle = yes: expected true or false" in message
    assert "data.sed: unknown key; did you mean data.seed?" in message
    assert "one of console, jsonl, tensorboard" in message


def test_overrides_and_references_that_are_wrong_are_named_with_everything_else(
    tmp_path: Path,
) -> None:
    text = (
        "data: {train_batch_size: many, seed: '${trainer.nothing}', prompt_key: '${now:A}'}\n"
        "trainer: {project_name: '${trainer.experiment_name}', experiment_name: '${data.seed}'}\n"
    )
    overrides = [
        "no form",
        "+data.train_batch_size=4",
        "~data.shuffle=7",
        "data.seed={",
        "data.sed=1",
    ]
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text), overrides)
    message = str(raised.value)
    assert "8 problems" in message
    for expected in (
        "data.train_batch_size = many: expected an integer >= 1",
        "data.seed: reference ${trainer.nothing}: trainer.nothing: unknown key",
        "data.prompt_key: the reference ${now:A} calls a resolver",
        "override 'no form': write key.path=value",
        "data.train_batch_size has the value many already",
        "override '~data.shuffle=7': the value is true, so nothing was removed",
        "override 'data.seed={'",
        "data.sed: unknown key; did you mean data.seed?",
    ):
        assert expected in message
    assert message.count("trainer.nothing: unknown key") == 1, "two keys refer to data.seed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", "run.yaml is not valid YAML: line "),
        ("data: {seed: 1, seed: 2}", "key 'seed' appears twice"),
        ("- a\n- b\n", "expected sections such as data"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml", [])


def test_a_folder_and_a_file_of_bytes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\xff")
    for path in (tmp_path, tmp_path / "model.bin"):
        with pytest.raises(ConfigError, match=r"cannot be read: .*; give a YAML file as UTF-8"):
            load_config(path, [])


@pytest.mark.parametrize(
    "text", ["data", "=3", "a b=1", "data.seed", "+++data.seed=1", "data..x=1"]
)
def test_an_override_of_no_known_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(None, [text])


# The values are those that Hydra 1.3 parses.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ("[]", []),
        ("{a:1,b:2}", {"a": 1, "b": 2}),
        ("{a: 1, b: 2}", {"a": 1, "b": 2}),
        ("{ a : 1 , b : 2 }", {"a": 1, "b": 2}),
        ("{enable_thinking:False}", {"enable_thinking": False}),
        ("{a:{b:{c:1}}}", {"a": {"b": {"c": 1}}}),
        ("{a:{b:1},c:2}", {"a": {"b": 1}, "c": 2}),
        ("{a:[1,2,3],b:x}", {"a": [1, 2, 3], "b": "x"}),
        ("[{a:1},{b:2}]", [{"a": 1}, {"b": 2}]),
        ("[{a:[{b:1}]}]", [{"a": [{"b": 1}]}]),
        ("[[1,2],[3,4]]", [[1, 2], [3, 4]]),
        ("{a:[],b:{}}", {"a": [], "b": {}}),
        ("{a:'x:y'}", {"a": "x:y"}),
        ('{a:"x:y"}', {"a": "x:y"}),
        ("{a:''}", {"a": ""}),
        ("{a:'it, is {x}',b:1}", {"a": "it, is {x}", "b": 1}),
        ("{a:'x # y'}", {"a": "x # y"}),
        ("{url:http://h:80/p}", {"url": "http://h:80/p"}),
        ("{url: http://h:80/p}", {"url": "http://h:80/p"}),
        ("[http://h:80/p,b]", ["http://h:80/p", "b"]),
        ("[a,b:c]", ["a", "b:c"]),
        ("{a:b:c}", {"a": "b:c"}),
        ("{a:b c}", {"a": "b c"}),
        ("{a:null,b:true}", {"a": None, "b": True}),
        ("{a:1e-6,b:-1,c:1_000}", {"a": 1e-6, "b": -1, "c": 1000}),
        ("{a:on}", {"a": "on"}),
        ("{a.b:1,a-b:2,a/b:c}", {"a.b": 1, "a-b": 2, "a/b": "c"}),
        ("{1:a}", {1: "a"}),
        ("{a:/x/y.py}", {"a": "/x/y.py"}),
        ("{a:12:30}", {"a": "12:30"}),
        ("{a:b@c}", {"a": "b@c"}),
        ("{aime:2024: math, b: 1}", {"aime": "2024: math", "b": 1}),
        (r"{aime\:2024: math}", {"aime:2024": "math"}),
        ('{a:"x: y"}', {"a": "x: y"}),
        ("[{a:{b:'c: d'}}]", [{"a": {"b": "c: d"}}]),
    ],
)
def test_a_mapping_in_an_override_means_what_it_means_to_hydra(text: str, value: object) -> None:
    assert parse_override(f"+k={text}").value == value


# The values are those that Hydra 1.3 parses.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'a\'b'", "a'b"),
        (r'"x\"y"', 'x"y'),
        (r'"a\nb"', r"a\nb"),
        (r"'a\\b'", r"a\\b"),
        (r"'a\\'", "a\\"),
        (r"'a\\\'b'", r"a\'b"),
        (r'".*\.experts\..*"', r".*\.experts\..*"),
        ("'a\nb'", "a\nb"),
        (r"a\,b", "a,b"),
        (r"a\ b\ ", "a b "),
        (r"\[a\]\{b\}\(c\)", "[a]{b}(c)"),
        (r"a\=b\:c\\d\e", r"a=b:c\d\e"),
        (r"[a\,b, c d ,'e\'f',\\]", ["a,b", "c d", "e'f", "\\"]),
        (r"[['a\nb'],{c:'d\'e',f\,g:{h:['i']}}]", [[r"a\nb"], {"c": "d'e", "f,g": {"h": ["i"]}}]),
        ("[${a},x${oc.env:B,c d}y]", ["${a}", "x${oc.env:B,c d}y"]),
        ("{a:${b},c: d: e}", {"a": "${b}", "c": "d: e"}),
        ("[*a,%b,@c,|d,?e,- f,a: b, :c]", ["*a", "%b", "@c", "|d", "?e", "- f", "a: b", ":c"]),
        ("[010,0x10,1_000,+1,1.,NULL,tRuE]", ["010", "0x10", 1000, 1, 1.0, None, True]),
        ("[inf,-Inf,'nan']", [math.inf, -math.inf, "nan"]),
    ],
)
def test_quotes_and_escapes_in_an_override_mean_what_they_mean_to_hydra(
    text: str, value: object
) -> None:
    assert parse_override(f"+k={text}").value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a b": "c", \'d\':[1,2,],}', {"a b": "c", "d": [1, 2]}),
        ("[~/a,é,a=b,(c),d # e]", ["~/a", "é", "a=b", "(c)", "d # e"]),
        ("[${a:${b}}]", ["${a:${b}}"]),
        (r"a,b\,c", r"a,b\,c"),
        ("it's", "it's"),
        (r"\\" * 60 + "!", r"\\" * 60 + "!"),
    ],
)
def test_what_hydra_refuses_in_an_override_may_be_read(text: str, value: object) -> None:
    assert parse_override(f"+k={text}").value == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "expected , or ] at character 3"),
        ("{a}", "expected : at character 3"),
        ("[a,,b]", "expected a value at character 4"),
        ("{:b}", "expected a key at character 2"),
        (
            "'a''b'",
            r"expected nothing more at character 4 .*; within the quotes, ' is written \\'$",
        ),
        ("['a''b']", r"expected , or ] at character 5 .*; within the quotes, ' is written \\'$"),
        ('"a""b"', r'within the quotes, " is written \\"$'),
        ("'a' 'b'", "expected nothing more at character 5 of its value$"),
        ("[" * 100_000, "expected at most 50 brackets within each other at character 52"),
        ("[{a:" * 26, "expected at most 50 brackets within each other"),
        ("'a", "expected a second quote at character 1"),
        ("{a:1,a:2}", "key 'a' appears twice in one mapping"),
        ("str(1)", r"calls Hydra's str\(\); write the value itself"),
        ("[int('1')]", r"calls Hydra's int\(\)"),
        ("choice(a,b)", r"calls Hydra's choice\(\)"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}"):
        parse_override(f"+k={text}")


def test_fifty_brackets_may_stand_within_each_other() -> None:
    value: object = "a"
    for _ in range(50):
        value = [value]
    assert parse_override(f"+k={format_override_value(value)}").value == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1e-6,
        math.inf,
        "a/b-c.d",
        "1e-6",
        "null",
        "",
        " a ",
        "it's",
        "a\\",
        "a\\'b\\\\",
        pytest.param("\\" * 200_000 + "a", id="backslashes"),
        "x\ny",
        "a,b: {c}",
        {"a:b": [1, "2", {"c d": []}]},
    ],
)
def test_a_value_that_was_written_as_an_override_is_read_again(value: object) -> None:
    found = parse_override(f"+k={format_override_value(value)}").value
    assert (found, type(found)) == (value, type(value))


# The values are those that Hydra 1.3 parses.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0.5", -0.5),
        ("1128", 1128),
        ("+5", 5),
        ("0612", "0612"),
        ("00", "00"),
        ("-08", "-08"),
        ("0x10", "0x10"),
        ("0o7", "0o7"),
    ],
)
def test_a_word_in_an_override_is_a_number_only_where_it_is_to_hydra(
    text: str, value: object
) -> None:
    found = parse_override(f"+k={text}").value
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("number", ["0100", "-08", "00", "010_000"])
def test_a_whole_number_with_leading_zeros_in_a_file_is_refused_with_its_remedy(
    number: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{seed: {number}}}\ntrainer: {{experiment_name: {number}}}\n")
    plain = int(number.replace("_", ""))
    with pytest.raises(ConfigError, match=f"data.seed = '{number}': .* write {plain}; .* octal"):
        load_config(file, [])
    assert load_config(file, ["data.seed=1"]).trainer.experiment_name == number
