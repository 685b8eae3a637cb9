"""Findings about a run's files: shards that are cut, rows, certificates."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.data.scoring import DEFAULT_ROUTES
from sluice.doctor.configuration import (
    check_configuration,
    check_security,
    date_findings,
    tls_off_findings,
)
from sluice.doctor.files import check_complete, check_model, model_findings
from sluice.doctor.prompts import check_data, source_findings
from sluice.errors import DataError
from sluice.security.development_ca import DevelopmentCa
from tests.support.certified import authority, write_pair, write_security
from tests.support.doctor_findings import only, run_of, severities, write_model
from tests.support.prompt_parquet import prompt_rows, write_prompts

KEY = "actor_rollout_ref.model.path"


def reported(folder: Path) -> str:
    return only(model_findings(KEY, str(folder)), "problem").what


def test_a_whole_model_is_one_line_with_its_size(tmp_path: Path) -> None:
    write_model(tmp_path)
    found = only(check_model(run_of(f"{KEY}={tmp_path}")), "ok")
    assert found.what.endswith("2 file(s) of weights, 0.0 MiB")


@pytest.mark.parametrize("kept", [4, 20, -1])
def test_a_file_that_was_cut_short_is_named(kept: int, tmp_path: Path) -> None:
    _, second = write_model(tmp_path)
    second.write_bytes(second.read_bytes()[:kept])
    assert second.name in reported(tmp_path)


@given(kept=st.floats(0, 1, exclude_max=True))
def test_no_prefix_of_a_file_passes_for_the_whole(
    kept: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    first, _ = write_model(folder)
    content = first.read_bytes()
    check_complete(KEY, first)
    first.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=f"{KEY}: {first.name} is not whole"):
        check_complete(KEY, first)


def test_bytes_behind_the_last_tensor_are_seen(tmp_path: Path) -> None:
    first, _ = write_model(tmp_path)
    first.write_bytes(first.read_bytes() + b"\0")
    assert f"{first.name} is not whole" in reported(tmp_path)


def test_a_missing_file_is_counted_and_named(tmp_path: Path) -> None:
    _, second = write_model(tmp_path)
    second.unlink()
    assert f"1 files that model.safetensors.index.json names are not there: {second.name}" in (
        reported(tmp_path)
    )


def test_a_pointer_of_git_lfs_is_reported_with_its_remedy(tmp_path: Path) -> None:
    first, _ = write_model(tmp_path)
    first.write_text("version https://git-lfs\noid sha256:0\nsize 5\n", encoding="utf-8")
    found = only(model_findings(KEY, str(tmp_path)), "problem")
    assert found.remedy == "fetch it with git lfs pull"


def test_an_index_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert "index.json cannot be read" in reported(tmp_path)


def test_a_folder_without_safetensors_or_tokenizer_is_no_model(tmp_path: Path) -> None:
    files = write_model(tmp_path)
    for file in (*files, tmp_path / "model.safetensors.index.json"):
        file.unlink()
    assert "holds no *.safetensors" in reported(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "holds no tokenizer" in reported(tmp_path)
    assert "is no folder" in reported(tmp_path / "none")
    for name, is_of_a_hub in (("Qwen/Qwen3-8B", True), ("models/a/b", False), ("/a/b", False)):
        remedy = only(model_findings(KEY, name), "problem").remedy
        assert remedy.endswith(f"as from `hf download {name} --local-dir DIR`") is is_of_a_hub
    assert severities(model_findings(KEY, "")) == ["problem"]


def test_without_safetensors_the_weights_are_left_out_and_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = write_model(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert severities(model_findings(KEY, str(tmp_path))) == ["warning"]
    second.unlink()
    assert severities(model_findings(KEY, str(tmp_path))) == ["problem", "warning"]


def test_a_critic_that_starts_from_another_model_is_looked_at(tmp_path: Path) -> None:
    write_model(tmp_path)
    examined = run_of(
        f"{KEY}={tmp_path}", "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}/none"
    )
    found = list(check_model(examined))
    assert severities(found) == ["ok", "problem"]
    assert found[1].what.startswith("critic.model.path")


def test_rows_are_counted_and_their_sources_reported(tmp_path: Path) -> None:
    rows = prompt_rows([f"question {i}" for i in range(130)])
    file = write_prompts(tmp_path / "train.parquet", rows)
    examined = run_of(f"data.train_files={file}", "data.train_batch_size=64")
    train, validation = check_data(examined)
    assert train.what == "data.train_files: 130 rows in 1 file(s); math_dapo"
    assert validation.what == "data.val_files is null: no validation"


def test_files_with_fewer_rows_than_their_groups_of_a_batch_are_warned_of(tmp_path: Path) -> None:
    few = write_prompts(tmp_path / "few.parquet", prompt_rows(["a", "b", "c"]))
    more = write_prompts(tmp_path / "more.parquet", prompt_rows([f"q {i}" for i in range(6)]))
    rest = ("data.train_batch_size=8", f"data.val_files={few}")

    def warned(*overrides: str) -> list[str]:
        found = check_data(run_of(*rest, *overrides))
        return [one.what for one in found if one.severity == "warning"]

    (found,) = warned(f"data.train_files={few}")
    assert found.startswith("data.train_files: 3 rows are fewer than its 8 groups")
    key = "sluice.sources"
    mixed = [f"{key}.math.files={few}", f"{key}.math.share=0.5"]
    mixed += [f"{key}.code.files={more}", f"{key}.code.share=0.5"]
    (found,) = warned(*mixed)
    assert found.startswith(f"{key}.math.files: 3 rows are fewer than its 4 groups")
    assert not warned(*mixed, "data.train_batch_size=1")


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty (0 bytes)"), (b"PAR1 and nothing", "train.parquet")]
)
def test_a_file_that_cannot_be_read_is_a_problem(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(content)
    found, _ = check_data(run_of(f"data.train_files={tmp_path}/train.parquet"))
    assert found.severity == "problem"
    assert said in found.what


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    rows = [
        {name: v for name, v in row.items() if name != "data_source"} for row in prompt_rows("a")
    ]
    file = write_prompts(tmp_path / "train.parquet", rows)
    found, _ = check_data(run_of(f"data.train_files={file}"))
    assert "no column 'data_source'" in found.what


def test_a_source_without_a_scorer_is_a_problem_unless_a_function_grades_it(
    tmp_path: Path,
) -> None:
    sources = {"my/set": 90, "math_dapo": 10}
    found = only(source_findings("data.train_files", sources, DEFAULT_ROUTES), "problem")
    assert "'my/set' (90 of the first 100 rows)" in found.what
    assert "reward.scorer_routes (exact_match, geo3k, gsm8k, gsm8k_flexible," in found.remedy
    rows = [{**row, "data_source": "my/set"} for row in prompt_rows(map(str, range(9)))]
    file = write_prompts(tmp_path / "train.parquet", rows)
    named = (f"data.train_files={file}", "data.train_batch_size=4")
    own = "reward.custom_reward_function.path=mine.py"
    assert severities(check_data(run_of(*named))) == ["problem", "ok", "ok"]
    assert severities(check_data(run_of(*named, own))) == ["ok", "ok"]


def test_fewer_rows_than_a_batch_are_a_warning(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "train.parquet", prompt_rows(["a question"]))
    found = check_data(run_of(f"data.train_files={file}", "data.train_batch_size=64"))
    assert severities(found) == ["warning", "ok", "ok"]


def test_rules_of_the_configuration_are_reported_but_not_those_of_other_checks() -> None:
    broken = run_of("actor_rollout_ref.rollout.n=1", "algorithm.filter_groups.enable=true")
    texts = [one.what for one in check_configuration(broken)]
    assert any("actor_rollout_ref.rollout.n = 1" in text for text in texts)
    assert not any(text.startswith(KEY) for text in texts)


def secured(folder: Path, *more: str) -> tuple[str, ...]:
    files = write_security(folder)
    return (*(f"sluice.security.{name}={value}" for name, value in files.items()), *more)


def test_sound_certificates_are_reported_with_their_end(tmp_path: Path) -> None:
    found = list(check_security(run_of(*secured(tmp_path))))
    assert severities(found) == ["ok", "ok"]
    assert found[0].what.startswith("sluice.security.cert_file holds until ")


def test_an_expired_certificate_is_one_problem_with_its_remedy(tmp_path: Path) -> None:
    expired = authority("ours").service(("127.0.0.1",), -1)
    certificate, key = write_pair(tmp_path, "expired", expired)
    examined = run_of(
        *secured(tmp_path),
        f"sluice.security.cert_file={certificate}",
        f"sluice.security.key_file={key}",
    )
    problems = [one for one in check_security(examined) if one.severity == "problem"]
    (found,) = problems
    assert "has expired" in found.what
    assert "sluice certs --force" in found.remedy


def test_a_certificate_that_ends_soon_and_a_secret_for_all_are_warnings(tmp_path: Path) -> None:
    soon = authority("ours").service(("127.0.0.1", "sluice"), 5)
    certificate, key = write_pair(tmp_path, "soon", soon)
    Path(key).chmod(0o644)
    examined = run_of(
        *secured(tmp_path),
        f"sluice.security.cert_file={certificate}",
        f"sluice.security.key_file={key}",
    )
    found = list(check_security(examined))
    assert severities(found) == ["warning", "warning", "ok"]
    assert "can be read by every user" in found[0].what
    assert "a certificate in it expires on " in found[1].what


def test_an_ended_authority_beside_its_successor_is_a_warning_that_names_it(tmp_path: Path) -> None:
    settings = secured(tmp_path)
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(DevelopmentCa(-1).ca.certificate + ca_file.read_bytes())
    found = list(check_security(run_of(*settings)))
    assert severities(found) == ["ok", "warning"]
    assert "ca_file: a certificate in it expired on " in found[1].what


def test_an_ended_authority_that_signed_our_certificate_is_a_problem(tmp_path: Path) -> None:
    settings, ended = secured(tmp_path), DevelopmentCa(-1)
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(ended.ca.certificate + ca_file.read_bytes())
    write_pair(tmp_path, "service", ended.service(("127.0.0.1", "sluice"), 30))
    found = list(check_security(run_of(*settings)))
    assert severities(found).count("problem") == 1


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ((20, 300), ["ok"]),
        ((13,), ["warning"]),
        ((-3, 300), ["warning"]),
        ((5, -3, 300), ["warning", "warning"]),
    ],
)
def test_each_certificate_that_expires_soon_is_a_warning(
    days: tuple[int, ...], expected: list[str]
) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    ends = [now + timedelta(days=each) for each in days]
    assert severities(date_findings("sluice.security.ca_file", ends, now)) == expected


def test_services_on_other_hosts_without_tls_are_a_warning() -> None:
    found = only(tls_off_findings(has_tokens=False, is_remote=True), "warning")
    assert "anyone may call" in found.why
    only(tls_off_findings(has_tokens=False, is_remote=False), "ok")


def test_a_missing_file_of_a_source_is_reported_once_under_its_own_key(tmp_path: Path) -> None:
    there = write_prompts(tmp_path / "there.parquet", prompt_rows(["a", "b"]))
    gone, key = tmp_path / "gone.parquet", "sluice.sources"
    examined = run_of(
        f"{key}.math.files={there}",
        f"{key}.math.share=0.5",
        f"{key}.code.files={gone}",
        f"{key}.code.share=0.5",
    )
    found = [*check_configuration(examined), *check_data(examined)]
    (named,) = (one.what for one in found if str(gone) in one.what)
    assert named.startswith(f"{key}.code.files")
