"""The launch that a script would make: run the script under bash without its programs, record their
calls, and find the launch among them, with its module and its arguments.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from sluice.config.loading.yaml_files import VERLS_OWN
from sluice.errors import ConfigError, DeadlineError

SUFFIXES = (".sh", ".bash")
_SETTING = re.compile(r"(?:\+{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)*=|~[A-Za-z_][\w.-]*)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_DOTTED = re.compile(r"(?:\+{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)+=)")
_OTHER_WORK = re.compile(
    r"(?:verl|recipe)\.(?:\w+\.)*(?:\w*sft_trainer\w*|main_generation\w*|main_eval\w*)"
)
# verl's modules and recipes, also as files.
_VERLS_MODULE = re.compile(r"(?:.*\.)?recipe\..*|verl\..*|.*\.verl\.(?:trainer|experimental)\..*")
_SAME_TRAINING = re.compile(r"\w*main_ppo\w*|main_dapo|fully_async_main|main_entropy")
_CONFIG_OPTIONS = {
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "path"),
    **dict.fromkeys(("--config-name", "-cn"), "name"),
}
_HAS_NPU = importlib.util.find_spec("torch_npu") is not None
_MAX_SHOWN_CHARS = 100
_SECRET = re.compile("(?:KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)  # of a variable
_SHORTEST_SECRET = 8  # a shorter text may be part of any word
# They read and print, or make what a redirection needs.
PRINTERS = (
    *("awk", "basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "hostname", "id"),
    *("jq", "ls", "mkdir", "mktemp", "nproc", "printenv", "readlink", "realpath", "sed", "seq"),
    *("sort", "tail", "tee", "tr", "uname", "uniq", "wc", "which", "whoami"),
)
# A script may look for them before it uses them, or call them by a path.
RECORDED = (
    *("python", "python3", "torchrun", "ray", "accelerate", "deepspeed", "srun", "nohup", "env"),
    *("pip", "conda"),
)
_RUN_WITH_CARE = ("bash", "sh", "nvidia-smi")  # as script_recorder.sh says
_RECORDER = """#!/bin/sh
printf '%s\\0' "$(($# + 1))" "${0##*/}" "$@" >>"$__SLUICE_CALLS"
"""
_ENV_OPTIONS = ("-u", "--unset", "-C", "--chdir")  # with a value
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")
# A user who is not root needs a namespace of its own to get the others.
_OF_A_USER = ("--user", "--map-current-user", "--keep-caps")
_READY = "ready\0"
# No programs' names: bash would run its own commands.
_UNSET, _EXPORT = ("unset",), ("export",)
_OF_BASH = re.compile("_|PATH|PWD|OLDPWD|SHLVL|BASH_.*|__SLUICE_.*")
_HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 20.0
_BACKGROUND_S = 2.0
_MAX_ERROR_CHARS = 600
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[^\]]*\])?\}|([A-Za-z_]\w*))")
_UNBOUND = re.compile(r"([A-Za-z_]\w*): unbound variable")
_HIDDEN = re.compile(
    r"\\.|'[^']*'|(?:^|(?<=[\s;]))#[^\n]*"  # an escape, a text in single quotes, a comment
    r'|"(?P<text>(?:\\.|[^"\\])*)"',
    re.DOTALL | re.MULTILINE,
)
_LOCAL = re.compile(r"\b(?:local|declare|read)\b([^\n;]*)")
_MAY_BE_UNSET = re.compile(  # ${A:+-$A}, for A in
    r"\$\{([A-Za-z_]\w*):?\+|\bfor\s+([A-Za-z_]\w*)\s*(?:\b(?:in|do)\b|;)"
)


@dataclass(frozen=True, slots=True)
class ScriptLaunch:
    """The launch of a script.

    Attributes:
        module: the module or file that it starts.
        config: the file that Hydra's ``--config-path`` and ``--config-name`` name, if it is there.
        settings: its ``KEY=VALUE`` arguments, in order; they come after the file.
        left_out: its other arguments, such as a ``--config-name`` without a file here.
        cut_off: lines of settings that belong to no launch, since it ends before them.
        not_run: the other programs that the script would run, as lines.
        unset: variables without a value that the script used.
        exported: variables of the launch's environment that this process does not have so.
    """

    module: str
    config: Path | None
    settings: tuple[str, ...]
    left_out: tuple[str, ...]
    cut_off: tuple[str, ...]
    not_run: tuple[str, ...]
    unset: tuple[str, ...]
    exported: Mapping[str, str]


def is_script(file: Path) -> bool:
    """Return whether a file is a shell script, by its suffix or its first line."""
    if file.suffix in SUFFIXES:
        return True
    try:
        with file.open("rb") as opened:
            first_line = opened.readline(200)
    except OSError:
        return False
    return re.match(rb"#!.*\b(ba|da|k|z)?sh\b", first_line) is not None


def launch_of(script: Path, arguments: Sequence[str], *, isolated: bool = True) -> ScriptLaunch:
    """Return what a script would launch; nothing is launched.

    Args:
        script: a bash script that calls ``python3 -m verl.trainer.main_ppo key=value ...``, also
            below ``ray job submit --`` and the like.
        arguments: overrides: the script gets them as ``"$@"``; those that it does not pass on
            follow its own.
        isolated: as of `record`.

    Raises:
        ConfigError: it launches nothing, several different things, or another algorithm's module,
            or cannot be run.
        DeadlineError: it does not end.
    """
    recording = record(script, arguments, isolated=isolated)
    launches = [call for call in recording.calls if _is_training(call)]
    if not launches:
        raise ConfigError(_no_launch_message(script, recording))
    if len(set(launches)) > 1:
        names = "; ".join(recording.as_text(call) for call in dict.fromkeys(launches))
        raise ConfigError(
            f"script {script}: starts {len(set(launches))} different trainings ({names}); give a "
            "script that starts one"
        )
    launch = launches[0]
    start = _start_of(launch)
    assert start is not None
    _check_algorithm(script, launch[start])
    launch_words = launch[start + 1 :]
    settings = [word for word in launch_words if _SETTING.match(word)]
    settings += _missing_arguments(arguments, launch_words)
    other_calls = [call for call in dict.fromkeys(recording.calls) if call not in launches]
    folder = Path(os.path.relpath(recording.exported.get("PWD", os.curdir)))
    words = [word for word in launch_words if not _SETTING.match(word)]
    config, left_out = _config_file(folder, launch[start], words)
    return ScriptLaunch(
        launch[start],
        config,
        tuple(settings),
        tuple(left_out),
        tuple(recording.as_text(call) for call in other_calls if _SETTING.match(call[0])),
        tuple(
            dict.fromkeys(
                recording.as_text(call) for call in other_calls if not _SETTING.match(call[0])
            )
        ),
        recording.unset,
        {
            name: value
            for name, value in recording.exported.items()
            if os.environ.get(name) != value and not _OF_BASH.fullmatch(name)
        },
    )


def _missing_arguments(arguments: Sequence[str], launch_words: Sequence[str]) -> list[str]:
    """Return the arguments that a launch with `launch_words` lacks, the last for each key.

    A launch that has all of them in a row got them from the script, whose order counts. A script
    that passes on some may have used a word that is no setting.
    """
    count = len(arguments)
    if any(
        launch_words[start : start + count] == tuple(arguments)
        for start in range(len(launch_words) - count + 1)
    ):
        return []
    effective = {_key_of(word): word for word in launch_words}
    only_settings = bool(set(arguments) & set(launch_words))
    last_arguments = {_key_of(w): w for w in arguments if _SETTING.match(w) or not only_settings}
    return [word for key, word in last_arguments.items() if effective.get(key) != word]


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _config_file(launched_in: Path, module: str, words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the file that Hydra's options among a launch's words name, and the other words.

    A relative ``--config-path`` begins at the module's folder, as in Hydra, or at the launch's;
    without that option it is the module's ``config``, as in verl. Of a file that is not there, or
    is verl's own by its name alone, the values are known.

    Raises:
        ConfigError: there is no such file in an absolute folder.
    """
    named_parts: dict[str, str] = {}
    other_words, place = list[str](), 0
    while place < len(words):
        option, has_value, value = words[place].partition("=")
        part = _CONFIG_OPTIONS.get(option)
        if part and not has_value:
            place += 1
            value = words[place] if place < len(words) else ""
        if part:
            named_parts[part] = value
        else:
            other_words.append(words[place])
        place += 1
    name = named_parts.get("name", "").removesuffix(".yaml")
    if name and ("path" in named_parts or not VERLS_OWN.fullmatch(name)):
        folder = Path(named_parts.get("path", "config").removeprefix("file://"))
        is_file = module.endswith(".py")
        beside = Path(module).parent if is_file else Path(*module.split(".")[:-1])
        name = f"{name}.yaml"
        for before in (beside, Path()) if "path" in named_parts else (beside,):
            if (file := launched_in / before / folder / name).is_file():
                return file, other_words
        if folder.is_absolute():
            raise ConfigError(
                f"configuration file {folder / name}, which the launch names by --config-path and "
                "--config-name, does not exist; put it there, or change the path in the script"
            )
    return None, [
        *other_words,
        *(f"--config-{part}={value}" for part, value in named_parts.items()),
    ]


def _start_of(call: Sequence[str]) -> int | None:
    """Return the position of the started module or file; None: the call is no launch.

    That is the module of the last ``-m``, or the last ``.py`` file, with a dotted setting after it;
    verl's own modules need none.
    """
    for place in range(len(call) - 1, 0, -1):
        is_module = call[place - 1] == "-m" and not _SETTING.match(call[place])
        if not is_module and not (call[place].endswith(".py") and "=" not in call[place]):
            continue
        is_verl = re.fullmatch(r"(verl|recipe)\.[\w.]*main\w*", call[place]) is not None
        if is_verl or any(_DOTTED.match(word) for word in call[place + 1 :]):
            return place
    return None


def _is_training(call: Sequence[str]) -> bool:
    start = _start_of(call)
    return start is not None and not _OTHER_WORK.fullmatch(call[start])


def _check_algorithm(script: Path, module: str) -> None:
    """Refuse a module of verl's whose code, not its keys, holds another algorithm."""
    name = module.removesuffix(".py").replace("/", ".")
    if _VERLS_MODULE.fullmatch(name) and not _SAME_TRAINING.fullmatch(name.rpartition(".")[2]):
        raise ConfigError(
            f"script {script}: starts {module}, whose code may train by another algorithm; sluice "
            "trains what the keys of verl.trainer.main_ppo and recipe.dapo.main_dapo say (their "
            "estimators and losses: docs/algorithms.md). If that is what it trains, name "
            "verl.trainer.main_ppo in the script"
        )


def _no_launch_message(script: Path, recording: Recording) -> str:
    for call in recording.calls:
        if (start := _start_of(call)) is not None:
            return (
                f"script {script}: starts {call[start]}, which is no reinforcement learning; "
                "sluice has no counterpart"
            )
    calls = (
        "; ".join(dict.fromkeys(recording.as_text(call) for call in recording.calls)) or "nothing"
    )
    exit_text = f", exit code {recording.exit_code}" if recording.exit_code else ""
    unset = f"; without a value: {', '.join(recording.unset)}" if recording.unset else ""
    errors = f"; it printed: {recording.errors.strip()}" if recording.errors.strip() else ""
    if recording.exit_code and recording.calls and not _UNBOUND.search(recording.errors):
        errors += _hint(recording.calls[-1])
    return (
        f"script {script}: starts no training with key=value arguments, such as python3 -m "
        f"verl.trainer.main_ppo data.train_batch_size=64; it would run: {calls}{exit_text}{unset}"
        f"{errors}"
    )


def _hint(last_call: Sequence[str]) -> str:
    if " ".join(last_call[1:3]).startswith("-c import torch_npu") and not _HAS_NPU:
        return (
            "; torch_npu is not installed here, so the script stopped; check it where the NPUs "
            "are, or give its settings in a file"
        )
    return "; programs print nothing here: if it needs what one prints, give its settings in a file"


@dataclass(frozen=True, slots=True)
class Recording:
    """What a script did.

    Attributes:
        calls: every program that it would have run, with its arguments.
        unset: variables that it uses and that have no value at its launch.
        exported: the environment of its launch.
        errors: what it wrote to standard error, without the lines of ``set -x``.
        exit_code: its own.
    """

    calls: tuple[tuple[str, ...], ...]
    unset: tuple[str, ...]
    exported: Mapping[str, str]
    errors: str
    exit_code: int

    def as_text(self, call: Sequence[str]) -> str:
        """Return a call as a line for people, cut if it is long, with exported secrets by name."""
        for name, value in self.exported.items():
            if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
                call = [word.replace(value, f"${name}") for word in call]
        line = shlex.join(call).replace("\n", " ")
        return line if len(line) <= _MAX_SHOWN_CHARS else f"{line[:_MAX_SHOWN_CHARS]} ..."


def printing_programs(script: str) -> list[str]:
    """Return the programs in a script's text that will really run: they only print."""
    words = set(re.findall(r"(?<![\w./=$-])[a-z]+(?:-[a-z]+)?(?![\w./=-])", _visible_code(script)))
    return sorted(words & {*PRINTERS, "nvidia-smi"})


def record(
    script: Path,
    arguments: Sequence[str],
    *,
    isolated: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
) -> Recording:
    """Run a script in the present folder; its programs are recorded in place of being run.

    Only `PRINTERS` and shells run. In isolation the script has no network and no other process,
    what it writes is lost, and everything below it ends with it.

    Args:
        script: the file.
        arguments: what the script gets as ``"$@"``.
        isolated: run it in namespaces of its own; else nothing protects from what it writes.
        time_limit_s: seconds after which it is killed.

    Raises:
        ConfigError: it cannot be read, there is no bash, or this machine cannot isolate it.
        DeadlineError: it does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(f"{script}: a launch script needs bash, which is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="sluice-script-") as scratch:
        folder = Path(scratch).resolve()
        calls = folder / "calls"
        calls.touch()
        environment = {
            **os.environ,
            "BASH_ENV": str(_HERE / "script_recorder.sh"),
            "__SLUICE_BIN": str(_install_programs(folder / "bin")),
            "__SLUICE_CALLS": str(calls),
            "__SLUICE_NAMES": " ".join(referenced_names(script_text(script))),
            "__SLUICE_NO_NPU": str(int(not _HAS_NPU)),
            "__SLUICE_RECORDED": " ".join((*RECORDED, *_RUN_WITH_CARE)),
        }
        before = _isolation_command(folder, bash) if isolated else []
        command = [*before, bash, str(script), *arguments]
        with (folder / "errors").open("w+", encoding="utf-8", errors="replace") as opened:
            try:
                exit_code = _run(command, environment, opened, time_limit_s)
            except OSError as error:
                raise ConfigError(_isolation_message(script, str(error))) from error
            except subprocess.TimeoutExpired as error:
                raise _time_limit_error(script, time_limit_s) from error
            opened.seek(0)
            errors = "".join(line for line in opened if not line.startswith("+"))
        recorded = os.fsdecode(calls.read_bytes())
        if isolated and not recorded.startswith(_READY):
            raise ConfigError(_isolation_message(script, errors))
        recorded_calls = list(_parse_calls(recorded.removeprefix(_READY)))
        return Recording(
            tuple(call for call in recorded_calls if call[:1] not in (_UNSET, _EXPORT)),
            tuple(dict.fromkeys([*_unset_variables(recorded_calls), *_UNBOUND.findall(errors)])),
            _exported_variables(recorded_calls),
            errors[-_MAX_ERROR_CHARS:],
            exit_code,
        )


def _unset_variables(calls: Sequence[Sequence[str]]) -> list[str]:
    """Return the variables without a value at the launch; without a launch, at the last call."""
    names: list[str] = []
    for call in calls:
        if call[:1] == _UNSET:
            names += call[1:]
        elif _is_training(call):
            break
        elif call is not calls[-1] and call[:1] != _EXPORT:
            names = []
    return names


def _exported_variables(calls: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the environment of the launch, with what a program before it sets (``env A=1``)."""
    exported: dict[str, str] = {}
    for call in calls:
        if call[:1] == _EXPORT:
            exported = dict(word.split("=", 1) for word in call[1:])
        elif _is_training(call):
            exported |= dict(
                word.split("=", 1) for word in _env_assignments(call[: _start_of(call)])
            )
            break
    return exported


def _env_assignments(words: Sequence[str]) -> list[str]:
    """Return the assignments of each ``env`` among the words, which end at its program."""
    names, is_after_env, before = [], False, ""
    for word in words:
        if PurePath(word).name == "env":
            is_after_env = True
        elif is_after_env and _VARIABLE.match(word):
            names.append(word)
        elif not word.startswith("-") and before not in _ENV_OPTIONS:
            is_after_env = False
        before = word
    return names


def _isolation_command(folder: Path, bash: str) -> list[str]:
    """Return the words before a command that isolate it. `folder` holds its calls."""
    memory = folder / "memory"
    memory.mkdir()
    user = () if os.geteuid() == 0 else _OF_A_USER
    inner = (bash, "-p", str(_HERE / "script_isolation.sh"), str(memory), str(folder / "calls"))
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *_NAMESPACES, *inner]


def _time_limit_error(script: Path, time_limit_s: float) -> DeadlineError:
    return DeadlineError(
        f"script {script}",
        "running it without its programs",
        time_limit_s,
        remedy="it may wait for a program's answer; give its key=value lines in a file",
    )


def _isolation_message(script: Path, errors: str) -> str:
    reason = (errors.strip().splitlines() or ["no reason given"])[-1]
    return (
        f"script {script}: this machine cannot isolate it ({reason}); give --trust-script to run "
        "it with your rights, or see docs/migrating-from-verl.md for what isolation needs"
    )


def script_text(script: Path) -> str:
    """Return the text of a script. Raise ConfigError if it cannot be read."""
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"script {script} cannot be read: {error}; give the path of a bash script"
        ) from error


def referenced_names(script: str) -> list[str]:
    """Return the variables that a script uses without a default, without names local to it, names
    that it tests (``${A:+-$A}``) and those of its loops."""
    code = _visible_code(script)
    defined = {
        word.partition("=")[0] for matches in _LOCAL.findall(code) for word in matches.split()
    }
    defined.update(tested or looped for tested, looped in _MAY_BE_UNSET.findall(code))
    matches = (braced or plain for braced, plain in _REFERENCE.findall(code))
    return [name for name in dict.fromkeys(matches) if name not in defined]


def _visible_code(script: str) -> str:
    """Return a script's text without comments and texts in single quotes."""
    return _HIDDEN.sub(lambda match: re.sub(r"\\.", " ", match["text"] or " "), script)


def _install_programs(folder: Path) -> Path:
    """Fill a folder with the programs that a script finds."""
    folder.mkdir()
    for name in (*PRINTERS, *_RUN_WITH_CARE):
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    recorder = folder / "recorder"
    recorder.write_text(_RECORDER, encoding="utf-8")
    recorder.chmod(0o700)
    for name in RECORDED:
        (folder / name).symlink_to(recorder)
    return folder


def _run(
    command: Sequence[str], environment: Mapping[str, str], errors: IO[str], time_limit_s: float
) -> int:
    """Return the exit code of a command; it is killed at the limit, with its process group."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )
    try:
        exit_code = process.wait(time_limit_s)
        _wait_for_group(process.pid)
        return exit_code
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_group(group: int) -> None:
    """Wait a moment for the background of a script, which may still start the training."""
    until_s = time.monotonic() + _BACKGROUND_S
    with suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.killpg(group, 0)
            time.sleep(0.05)


def _parse_calls(recorded: str) -> Iterator[tuple[str, ...]]:
    words = recorded.split("\0")[:-1]
    while words and words[0].isdecimal():
        end = 1 + int(words[0])
        yield tuple(words[1:end])
        words = words[end:]
