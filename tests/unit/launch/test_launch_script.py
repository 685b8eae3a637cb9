"""Launch scripts of verl: what bash makes of them, and that nothing of them is executed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sluice.errors import ConfigError, DeadlineError
from sluice.launch.script.launch import ScriptLaunch, is_script, launch_of
from sluice.launch.script.recording import printers_in, record, referenced_names

VERL = "python3 -m verl.trainer.main_ppo"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch(text: str, *arguments: str) -> ScriptLaunch:
    script = Path("run.sh")
    script.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    return launch_of(script, arguments)


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
        ("torchrun --nproc 2 -m verl.trainer.sft a.b=1", ["a.b=1"]),
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


def test_other_arguments_and_other_programs_are_reported() -> None:
    found = launch(f"pip install -U x\n{VERL} --config-name=other a.b=1")
    assert found.left_out == ("--config-name=other",)
    assert found.not_run == ("pip install -U x",)
    assert found.module == "verl.trainer.main_ppo"


@pytest.mark.parametrize(
    "line",
    [
        "{touch} made",
        "touch made",
        "PATH={bin}:$PATH; touch made",
        "export PATH={bin}:$PATH\ntouch made",
        "PATH={bin}:$PATH touch made",
        "T={touch}; $T made",
        'T="{touch}"; "$T" made > log',
        "X=1 {touch} made",
        "x=$({touch} made)",
        'echo "$({touch} made)"',
        'echo "$({touch} made)" > log',
        "echo x | {touch} made",
        "{touch} made &\nwait",
        "f() {{ {touch} made; }}; f",
        "bash -c '{touch} made'",
        "./other.sh",
        "source other.sh",
        "{bash} other.sh",
        "command {touch} made",
        "if {touch} made; then :; fi",
        "echo text > made",
        "echo text >> made",
        "echo text &> made",
        ": > 'made'",
        "{{ echo text; }} | tee made",
        "exec > >(tee made)",
        "cat <<EOF > made\ntext\nEOF",
        "sed -i s/a/b/ victim",
        "sed -n 'w made' victim",
        "rm victim",
        "echo text > victim",
        "for x in 1; do echo text; done > victim",
        "echo text >| victim",
        "kill -9 $$",
    ],
)
def test_nothing_but_printing_programs_runs_and_no_file_is_written(line: str) -> None:
    Path("victim").write_text("as it was", encoding="utf-8")
    bin_folder = "/usr/bin" if Path("/usr/bin/touch").exists() else "/bin"
    words = {"touch": f"{bin_folder}/touch", "bin": bin_folder, "bash": f"{bin_folder}/bash"}
    other = Path("other.sh")
    other.write_text(f"#!/bin/bash\n{words['touch']} made\n", encoding="utf-8")
    other.chmod(0o700)
    script = Path("run.sh")
    script.write_text(f"{line.format(**words)}\n{VERL} a.b=1\n", encoding="utf-8")
    recording = record(script, ())
    # Bash itself does not survive `exec > file`, nor a file that it may not overwrite under set -e.
    assert any("a.b=1" in call for call in recording.calls) or recording.exit_code
    assert recording.exit_code >= 0
    assert not Path("made").exists()
    assert Path("victim").read_text(encoding="utf-8") == "as it was"


def test_variables_without_a_value_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setenv("GIVEN", "1")
    text = f"A=1\n# $COMMENT\necho '$QUOTED'\n{VERL} a.b=$DATA/x a.c=$A a.d=$GIVEN a.e=${{E:-1}}"
    found = launch(text)
    assert found.unset == ("DATA",)
    assert found.settings[0] == "a.b=/x"


def test_a_script_that_stops_at_an_unset_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(ConfigError, match="without a value: DATA"):
        launch(f"set -u\n{VERL} a.b=$DATA")


def test_names_with_defaults_in_quotes_and_local_ones_are_not_looked_for() -> None:
    script = "local x=1\necho $x ${y:-1} '$z' \"$a ${b[@]}\" # $c\n\\$d"
    assert referenced_names(script) == ["a", "b"]


def test_what_would_run_is_known_before() -> None:
    assert printers_in("# date\nx=$(basename $0)\nls -l | wc -l\npython3 ls.py") == [
        "basename",
        "ls",
        "wc",
    ]


def test_a_script_that_does_not_end_is_killed_with_everything_below_it() -> None:
    script = Path("run.sh")
    script.write_text("echo $$ > /dev/null\n(while :; do :; done) &\nwhile :; do :; done\n")
    mark = f"SLUICE_TEST_MARK={os.getpid()}"
    os.environ["SLUICE_TEST_MARK"] = str(os.getpid())
    try:
        with pytest.raises(DeadlineError, match=r"run\.sh"):
            record(script, (), time_limit_s=1.0)
    finally:
        del os.environ["SLUICE_TEST_MARK"]
    until_s = time.monotonic() + 30.0  # a killed process is gone a moment later
    while [pid for pid in _processes() if mark in _environment(pid)]:
        assert time.monotonic() < until_s
        time.sleep(0.05)


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
