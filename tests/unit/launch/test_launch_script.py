"""Launch scripts of verl: what bash makes of them, and that nothing of them is executed."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.errors import ConfigError, DeadlineError
from sluice.launch.script import (
    ScriptLaunch,
    is_script,
    launch_of,
    printing_programs,
    record,
    referenced_names,
)
from tests.support.isolation import forbid_isolation, isolated

VERL = "python3 -m verl.trainer.main_ppo"
SLEEP = "command -p sleep 600"  # a program that really runs


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch(text: str, *arguments: str, is_isolated: bool = False) -> ScriptLaunch:
    """The launch of a script of these lines; isolation, not needed for most, takes the time."""
    script = Path("run.sh")
    script.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    return launch_of(script, arguments, isolated=is_isolated)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (f"n=$((4 * 2))\n{VERL} a.b=$n a.c=$((n+1))", ["a.b=8", "a.c=9"]),
        (f"{VERL} a.b=$(echo hi | tr h H) a.c=`basename /x/y`", ["a.b=Hi", "a.c=y"]),
        (f'args=(a.b=\'[1, 2]\' a.c="x y")\n{VERL} "${{args[@]}}"', ["a.b=[1, 2]", "a.c=x y"]),
        (f"set -x\n{VERL} \\\n  a.b=1 \\\n  ++a.c=2 ~a.d $@", ["a.b=1", "++a.c=2", "~a.d"]),
        (f"x=${{NOT_THERE:-5}}\nset -euo pipefail\n{VERL} a.b=$x", ["a.b=5"]),
        (f'f() {{ {VERL} "$@"; }}\nf a.b=1', ["a.b=1"]),
        (f"if [[ 3 > 2 ]]; then {VERL} a.b=1; fi", ["a.b=1"]),
        (f"CUDA=1 {VERL} a.b=1 2>&1 | tee log.txt", ["a.b=1"]),
        (f"nohup {VERL} a.b='x > y' > log.txt 2>&1 &\nwait", ["a.b=x > y"]),
        (f'eval "{VERL} a.b=1"', ["a.b=1"]),
        (f"exec {VERL} a.b=1", ["a.b=1"]),
        (f"bash -c '{VERL} a.b=1'", ["a.b=1"]),
        ("torchrun --nproc 2 -m own.trainer a.b=1", ["a.b=1"]),
        ("python train.py a.b=1", ["a.b=1"]),
        (
            "ray start --head\nray job submit --address=http://127.0.0.1:8265 "
            f"--runtime-env=env.yaml -- {VERL} a.b=1",
            ["a.b=1"],
        ),
    ],
)
def test_a_script_means_what_bash_makes_of_it(lines: str, settings: list[str]) -> None:
    assert list(launch(lines).settings) == settings


def test_overrides_are_the_scripts_own_arguments() -> None:
    assert launch(f'{VERL} a.b=1 "$@"', "a.b=2").settings == ("a.b=1", "a.b=2")
    assert launch(f"{VERL} a.b=$1", "x=y").settings == ("a.b=x=y", "x=y")


def test_overrides_that_a_script_does_not_pass_on_follow_its_own() -> None:
    assert launch(f"{VERL} a.b=1", "a.b=2").settings == ("a.b=1", "a.b=2")
    # One that is the script's own as well does not show that it passes on the others.
    assert launch(f"{VERL} a.b=1 a.c=1", "a.b=1", "a.c=2", "a.d=3", "a.d=4").settings == (
        *("a.b=1", "a.c=1"),
        *("a.c=2", "a.d=4"),
    )
    assert launch(f'n=$1; shift\n{VERL} a.b=$n "$@"', "8", "a.c=3").settings == ("a.b=8", "a.c=3")


def test_other_arguments_and_other_programs_are_reported() -> None:
    found = launch(f"pip install -U x\n{VERL} --config-name=other a.b=1")
    assert found.left_out == ("--config-name=other",)
    assert found.not_run == ("pip install -U x",)
    assert found.module == "verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ('--config-path="$PWD/conf" --config-name=multi', "{here}/conf/multi.yaml"),
        ("--config-path conf --config-name multi.yaml", "conf/multi.yaml"),
        ("-cn multi -cp conf", "conf/multi.yaml"),
        ("--config-dir=file://$PWD/conf --config-name=multi", "{here}/conf/multi.yaml"),
    ],
)
def test_the_file_that_hydras_options_name_is_the_launchs_configuration(
    options: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/multi.yaml").write_text("a: {b: 0}", encoding="utf-8")
    found = launch(f"{VERL} {options} a.b=1 --help")
    assert str(found.config) == file.format(here=tmp_path)
    assert found.settings == ("a.b=1",)
    assert found.left_out == ("--help",)


@pytest.mark.parametrize("program", ["-m recipe.dapo.main_dapo", "recipe/dapo/main_dapo.py"])
@pytest.mark.parametrize("path", ["--config-path=config ", ""])
def test_a_configuration_path_begins_at_the_modules_folder(
    program: str, path: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe/dapo/config").mkdir(parents=True)
    (tmp_path / "recipe/dapo/config/mine.yaml").touch()
    start = f"python3 {program} {path}--config-name"
    assert launch(f"{start}=mine a.b=1").config == Path("recipe/dapo/config/mine.yaml")
    found = launch(f"{start} other a.b=1")
    assert found.config is None
    assert found.left_out == (*path.split(), "--config-name=other")


@pytest.mark.parametrize("program", ["main.py --config-path", "-m mine.main --config-dir"])
def test_a_configuration_path_begins_where_the_script_has_gone(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe/mine/config").mkdir(parents=True)
    (tmp_path / "recipe/mine/config/mine.yaml").touch()
    found = launch(f"cd recipe/mine\npython3 {program} config --config-name mine a.b=1")
    assert found.config == Path("recipe/mine/config/mine.yaml")


def test_a_configuration_of_verls_own_is_read_only_where_the_launch_says(tmp_path: Path) -> None:
    (tmp_path / "verl/trainer/config").mkdir(parents=True)
    (tmp_path / "verl/trainer/config/ppo_megatron_trainer.yaml").touch()
    assert launch(f"{VERL} --config-name=ppo_megatron_trainer.yaml a.b=1").config is None
    found = launch(f"{VERL} --config-path=config --config-name=ppo_megatron_trainer.yaml a.b=1")
    assert found.config == Path("verl/trainer/config/ppo_megatron_trainer.yaml")


def test_a_missing_configuration_in_an_absolute_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/none/mine.yaml, which the launch names .* not exist"):
        launch(f"{VERL} --config-path=/none --config-name=mine a.b=1")


def test_the_environment_is_that_of_the_launch() -> None:
    found = launch(
        "export HERE=1 TEXT=$'a\\nb=c'; OWN=2\nIFS=,\npip install x\n"
        f"HERE=3 {VERL} a.b=1\nexport HERE=4; pip list"
    ).exported
    assert (found["HERE"], found["TEXT"]) == ("3", "a\nb=c")
    assert found.keys() == {"HERE", "TEXT"}
    assert launch(f"A=1\nnohup env B=2 C= {VERL} a.b=1 &\nwait").exported == {"B": "2", "C": ""}
    options = "torchrun --rdzv_conf timeout=900 -m verl.trainer.main_ppo"
    assert launch(f"{options} a.b=1").exported == {}
    assert launch(f"env -u D A=1 {options} a.b=1").exported == {"A": "1"}
    by_path = f"nohup /usr/bin/env A=1 {VERL} a.b=1"
    assert launch(by_path).exported == {"A": "1"}


def test_a_variable_that_is_no_text_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", os.fsdecode(b"\xff"))
    found = launch(f"export THERE=$'\\xfe'\n{VERL} a.b=1").exported
    assert found == {"THERE": os.fsdecode(b"\xfe")}


def test_an_exported_secret_is_shown_by_its_name_alone() -> None:
    text = "export WANDB_API_KEY=0123456789 TOKENIZERS_PARALLELISM=disabled\n"
    text += 'wandb login $WANDB_API_KEY\ncurl -H "Bearer $WANDB_API_KEY" disabled\n'
    shown = ("wandb login '$WANDB_API_KEY'", "curl -H 'Bearer $WANDB_API_KEY' disabled")
    assert launch(f"{text}{VERL} a.b=1").not_run == shown
    with pytest.raises(ConfigError, match="wandb login") as refused:
        launch(text)
    assert "0123456789" not in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        "touch made",
        "PATH={bin}:$PATH; touch made",
        "export PATH={bin}:$PATH\ntouch made",
        "T={touch}; $T made",
        'X="1 2" T={touch}; "$T" made > log',
        "X='1 2' {touch} made",
        'echo "$({touch} made)" > log',
        "echo x | {touch} made",
        "{touch} made &\nwait",
        'f() {{ "$@"; }}; f {touch} made',
        "bash -c '{touch} made'",
        "bash -elc 'touch made'",
        "./other.sh",
        "source other.sh",
        "{bin}/bash other.sh",
        "if {touch} made; then :; fi",
    ],
)
def test_programs_are_recorded_however_they_are_called(line: str) -> None:
    folder = Path(shutil.which("touch") or "").parent
    words = {"touch": folder / "touch", "bin": folder}
    other = Path("other.sh")
    other.write_text(f"#!/bin/bash\n{words['touch']} made\n", encoding="utf-8")
    other.chmod(0o700)
    found = launch(f"{line.format(**words)}\n{VERL} a.b=1")
    assert [one.rpartition("/")[2] for one in found.not_run] == ["touch made"]


@pytest.mark.parametrize(
    "start",
    [
        "/opt/conda/bin/python3",
        '"$HOME/bin/python3"',
        "~/bin/python3",
        "PY=/opt/bin/python; $PY -u",
        "CONDA=/opt; N=1 $CONDA/bin/torchrun",
        "exec /opt/bin/python3",
        "PATH=/usr/bin:$PATH python3",
        "command python3",
        "env A=1 python3",
        "nohup /opt/bin/python3",
    ],
)
def test_a_launch_is_found_however_its_program_is_named(start: str) -> None:
    assert launch(f"set -eu\n{start} -m verl.trainer.main_ppo a.b=1").settings == ("a.b=1",)


@isolated
def test_a_launch_in_the_background_is_found() -> None:
    assert launch(f"set -e\nnohup {VERL} a.b=1 > log 2>&1 &", is_isolated=True).settings == (
        "a.b=1",
    )


@isolated
@pytest.mark.parametrize(
    "line",
    [
        "command -p touch made",
        "exec -a x {touch} made",
        "bash -ic '{touch} made'",
        "x=$({touch} made > log)",
        "echo 2 | sort -o victim",
        "uniq other.sh victim",
        "sed -i s/a/b/ victim",
        "awk 'BEGIN {{ print 1 > \"made\" }}'",
        "command -p rm -f victim",
        "command -p chmod 777 victim",
        "command -p ln victim made",
        "command -p touch /dev/shm/{mark}",
        "command -p kill -9 {pid}",
        "command -p touch /proc/{pid}/root/$PWD/made",
        "command -p umount $PWD /tmp /; touch made",
        "command -p unshare -Urm sh -c 'umount -l /tmp; mount -o remount,rw /; echo > victim'",
        "echo text > made",
        "echo text >> victim",
        "echo text >| victim",
        ": &> 'victim'",
        "{{ echo text; }} > victim",
        "for x in 1; do echo text; done > victim",
        "exec > >(tee made)",
        "exec > victim",
        "cat <<EOF > made\ntext\nEOF",
        "mkdir made",
        "echo 1 > /proc/sys/kernel/core_uses_pid",
        "kill -9 $$",
        "date -s 2001-01-01",
        "trap '' DEBUG; PATH={bin}; touch made; rm victim",
    ],
)
def test_what_an_isolated_script_does_leaves_nothing(line: str) -> None:
    Path("victim").write_text("as it was", encoding="utf-8")
    before = Path("victim").stat()
    Path("other.sh").write_text("text\n", encoding="utf-8")
    touch = shutil.which("touch") or ""
    mark = f"sluice-test-{os.getpid()}"
    words = {"touch": touch, "bin": Path(touch).parent, "mark": mark, "pid": os.getpid()}
    settings = Path("/proc/sys/kernel/core_uses_pid")
    was = settings.read_text(encoding="utf-8")
    found = launch(f"({line.format(**words)}\n) || :\n{VERL} a.b=1", is_isolated=True)
    assert found.settings == ("a.b=1",)
    assert sorted(os.listdir()) == ["other.sh", "run.sh", "victim"]
    after = Path("victim").stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_nlink,
    )
    assert not Path("/dev/shm", mark).exists()
    assert settings.read_text(encoding="utf-8") == was
    assert time.time() > 1e9 + 1e8  # the clock is not set back


@isolated
def test_an_isolated_script_reads_what_it_wrote() -> None:
    Path("train.log").write_text("old", encoding="utf-8")
    lines = (
        "set -e\necho start > train.log\nmkdir -p out/x\necho 7 > out/x/n\nsed -i s/7/8/ out/x/n"
    )
    assert launch(f"{lines}\n{VERL} a.b=$(cat out/x/n)", is_isolated=True).settings == ("a.b=8",)
    assert Path("train.log").read_text(encoding="utf-8") == "old"


@isolated
def test_an_isolated_script_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = launch(
            f"(echo > /dev/tcp/127.0.0.1/{port}) && n=1 || n=0\n{VERL} a.b=$n", is_isolated=True
        )
    assert found.settings == ("a.b=0",)


@isolated
def test_an_isolated_script_sees_the_user_and_the_folder(tmp_path: Path) -> None:
    found = launch(f"{VERL} a.b=$(id -un) a.c=$PWD a.d=$(ls)", is_isolated=True)
    assert found.settings == (f"a.b={getpass.getuser()}", f"a.c={tmp_path}", "a.d=run.sh")


def test_a_machine_without_namespaces_refuses_a_script_and_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_isolation(monkeypatch, Path("bin"))
    script = Path("run.sh")
    script.write_text(f"echo text > made\npip install x\n{VERL} a.b=1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"\(unshare failed: Not permitted\).* --trust-script"):
        launch_of(script, ())
    assert not Path("made").exists()
    trusted = launch_of(script, (), isolated=False)
    assert (trusted.settings, trusted.not_run) == (("a.b=1",), ("pip install x",))
    assert Path("made").read_text(encoding="utf-8") == "text\n"


def test_variables_without_a_value_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setenv("GIVEN", "1")
    text = f"A=1\n# $COMMENT\necho '$QUOTED'\n{VERL} a.b=$DATA/x a.c=$A a.d=$GIVEN a.e=${{E:-1}}"
    found = launch(text)
    assert found.unset == ("DATA",)
    assert found.settings[0] == "a.b=/x"


def test_a_variable_that_gets_its_value_before_the_launch_is_not_missing() -> None:
    found = launch(f"python3 -c 'import torch'\nfor v in $(env); do :; done\nA=1\n{VERL} a.b=$A")
    assert "A" not in found.unset
    assert launch("uv sync\nuv run python3 -m verl.trainer.main_ppo a.b=$MISSING").unset == (
        "MISSING",
    )


def test_devices_are_npus_only_where_torch_npu_is() -> None:
    probe = "$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)"
    assert launch(f"{VERL} a.b={probe}").settings == ("a.b=gpu",)


def test_a_probe_that_catches_its_own_error_does_not_stop_a_script() -> None:
    probe = "try:\n  import torch_npu\nexcept ImportError: print(0)"
    assert launch(f'set -e\nn=$(python3 -c "{probe}")\n{VERL} a.b=1').settings == ("a.b=1",)


def test_a_script_that_stops_without_npus_says_so() -> None:
    with pytest.raises(ConfigError, match="torch_npu is not installed here, so the script stopped"):
        launch(f"set -e\npython3 -c 'import torch_npu'\n{VERL} a.b=1")


def test_settings_after_a_comment_in_the_launch_are_reported_as_cut_off() -> None:
    found = launch(f"{VERL} a.b=1 \\\n  # why\n  +a.c=2 \\\n  a.d=3")
    assert found.settings == ("a.b=1",)
    assert (found.cut_off, found.not_run) == (("+a.c=2 a.d=3",), ())


@pytest.mark.parametrize(
    ("lines", "cut_off"),
    [
        ("a.b=1\n  a.c=/m/q \\\n  a.d=3", "a.c=/m/q a.d=3"),
        ('a.b=1\n  ++a.c="$M"', "++a.c=/m/q"),
        ('a.b=1 \\\n  # why\n  a.c="[/x, /y]" 2>&1 | tee log', "'a.c=[/x, /y]'"),
        ("a.b=1\n  a.c=/bin/id", "a.c=/bin/id"),
    ],
)
def test_settings_with_a_path_are_reported_as_cut_off(lines: str, cut_off: str) -> None:
    found = launch(f"M=/m/q\n{VERL} {lines}")
    assert found.settings == ("a.b=1",)
    assert found.cut_off == (cut_off,)


@pytest.mark.parametrize(
    "module", ["verl.trainer.fsdp_sft_trainer", "verl.trainer.main_generation"]
)
def test_a_script_of_other_work_is_refused_by_name(module: str) -> None:
    with pytest.raises(ConfigError, match=f"starts {module}, which is no reinforcement learning"):
        launch(f"torchrun -m {module} data.path=x")


def test_other_work_after_a_training_is_not_run() -> None:
    found = launch(f"{VERL} a.b=1\npython3 -m verl.trainer.main_generation c.d=2")
    assert found.settings == ("a.b=1",)
    assert found.not_run == ("python3 -m verl.trainer.main_generation c.d=2",)


@pytest.mark.parametrize(
    "module",
    [
        "-m verl.recipe.retrieval.main_ppo",
        "-m verl.trainer.main_ppo_v0",
        "-m recipe.dapo.src.main_dapo",
        "-m recipe.entropy.main_entropy",
        "-m recipe.one_step_off_policy.async_main_ppo",
        "-m verl.experimental.fully_async_policy.fully_async_main",
        "recipe/dapo/main_dapo.py",
        "own/recipes/train.py",
    ],
)
def test_a_training_is_known_by_the_last_part_of_its_name(module: str) -> None:
    assert launch(f"python3 {module} a.b=1").settings == ("a.b=1",)


@pytest.mark.parametrize(
    "module",
    [
        "-m recipe.sppo.main_sppo",
        "-m recipe.flowrl.main_flowrl",
        "-m verl.trainer.other",
        "recipe/spin/main_spin.py",
        "/opt/verl/recipe/prime/main_prime.py",
    ],
)
def test_a_recipe_with_an_algorithm_in_its_code_is_refused_by_name(module: str) -> None:
    with pytest.raises(ConfigError, match=f"starts {module.split()[-1]}, whose code may train by"):
        launch(f"python3 {module} a.b=1")


def test_a_script_that_needs_what_a_program_prints_is_refused_with_a_remedy() -> None:
    script = f"set -x\nd=$(python3 - <<'EOF'\nprint(1)\nEOF\n)\n[[ $d ]] || exit 1\n{VERL} a.b=1"
    with pytest.raises(ConfigError, match=r"exit code 1.*give its settings in a file") as raised:
        launch(script)
    assert "it printed" not in str(raised.value)


def test_a_script_that_stops_at_an_unset_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(ConfigError, match="without a value: DATA") as raised:
        launch(f"set -u\npip install x\n{VERL} a.b=$DATA")
    assert "programs print nothing" not in str(raised.value)


def test_names_with_defaults_in_quotes_and_local_ones_are_not_looked_for() -> None:
    script = "local x=1\necho $x ${y:-1} '$z' \"$a ${b[@]}\" # $c\n\\$d"
    assert referenced_names(script) == ["a", "b"]


def test_names_that_a_script_tests_and_those_of_its_loops_are_not_looked_for() -> None:
    preload = 'export LD_PRELOAD="x.so${LD_PRELOAD:+:$LD_PRELOAD}"'
    loop = 'for v in $(env); do unset "$v"; done'
    assert referenced_names(f'{preload}\n{loop}\nname=a${{S+"-"}}${{S}}$MISSING') == ["MISSING"]
    assert referenced_names('echo "waits for MODEL"\nls $MODEL') == ["MODEL"]


def test_what_would_run_is_known_before() -> None:
    assert printing_programs("# date\nx=$(basename $0)\nls -l | wc -l\npython3 ls.py") == [
        "basename",
        "ls",
        "wc",
    ]


@pytest.mark.parametrize(
    ("lines", "is_isolated"),
    [
        (f"({SLEEP}) &\n{SLEEP}", False),
        pytest.param(f"({SLEEP}) &\n{SLEEP}", True, marks=isolated),
        pytest.param(f"set -m\n({SLEEP}) &\nexit 0", True, marks=isolated),
        pytest.param(f"command -p setsid -f sh -c '{SLEEP}'", True, marks=isolated),
    ],
)
def test_nothing_that_a_script_started_outlives_it(
    lines: str, *, is_isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path("run.sh")
    script.write_text(lines, encoding="utf-8")
    monkeypatch.setenv("SLUICE_TEST_MARK", str(os.getpid()))
    with suppress(DeadlineError):
        record(script, (), isolated=is_isolated, time_limit_s=1.5)
    until_s = time.monotonic() + 30.0  # a killed process is gone a moment later
    while [pid for pid in _processes() if f"SLUICE_TEST_MARK={os.getpid()}" in _environment(pid)]:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_script_that_does_not_end_is_named() -> None:
    script = Path("run.sh")
    script.write_text(SLEEP, encoding="utf-8")
    with pytest.raises(DeadlineError, match=r"run\.sh"):
        record(script, (), isolated=False, time_limit_s=1.0)


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("text", ["echo hello\npip install x", "python3 -c 'print(1)'"])
def test_a_script_without_a_training_is_refused_with_what_it_would_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"starts no training .*it would run: (pip|python3)"):
        launch(text)


def test_a_script_that_starts_several_trainings_is_refused() -> None:
    with pytest.raises(ConfigError, match="starts 2 different trainings"):
        launch(f"for n in 1 2; do {VERL} a.b=$n; done")


def test_scripts_are_known_by_suffix_or_first_line(tmp_path: Path) -> None:
    for name, first in (("a.sh", ""), ("a.bash", ""), ("a", "#!/bin/bash"), ("b", "#!/bin/sh -e")):
        (tmp_path / name).write_text(f"{first}\n")
        assert is_script(tmp_path / name)
    (tmp_path / "c.yaml").write_text("data: {}\n")
    assert not is_script(tmp_path / "c.yaml")
