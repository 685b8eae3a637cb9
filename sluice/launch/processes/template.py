"""A process that has imported what services need, and forks itself into them:
`python -m sluice.launch.processes.template FD MODULE... SPACE`.

It computes nothing, so its forks begin as a new process does after its imports. Imports may start
threads, which a fork lacks: jemalloc's, by pyarrow, and OpenBLAS's, by numpy, where more than one
computes. Both libraries prepare for it (pthread_atfork): OpenBLAS ends its threads before a fork
and starts them when it next computes, and jemalloc does without its own. Each request is one
message of JSON on the socket FD, with the descriptor for output; answers are the id of the process
with a descriptor of it, and later its exit code. It ends with the socket's other end, and the
kernel ends its forks with it.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from sluice.concurrency.process import SUPERVISOR_VARIABLE, end_with_supervisor, stat_fields

MESSAGE_BYTES = 1 << 20
SPACE = " " * 4096
"""The last argument of a template: memory of its command line, which the forks' lines replace."""
_ARGUMENTS_FROM, _ARGUMENTS_TO = 45, 46  # in `stat_fields`: where that memory is
_STANDARD = (0, 1, 2)


def main(arguments: Sequence[str]) -> int:
    """Import, then fork on request until the other end is closed."""
    end_with_supervisor()
    requests = socket.socket(fileno=int(arguments[0]))
    gc.disable()  # collections find nothing in what is imported, and take a tenth of the time
    for module in arguments[1:-1]:
        with suppress(ImportError):  # the service reports what is missing, in its own words
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy the pages of all objects
    gc.enable()
    _serve(requests)
    return 0


def _serve(requests: socket.socket) -> None:
    template = os.getpid()
    # A descriptor of each fork, readable once it has ended, with its id.
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _answer(requests, {"pid": key.data, "code": os.waitstatus_to_exitcode(status)})
                continue
            message, outputs, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
            if not message:
                return
            try:
                pid, process_descriptor = _fork(json.loads(message), outputs, selector, template)
            except OSError as error:  # no descriptor or no process is free
                _answer(requests, {"failed": error.errno or errno.EIO})
                continue
            finally:
                for descriptor in outputs:
                    os.close(descriptor)
            selector.register(process_descriptor, selectors.EVENT_READ, pid)
            _answer(requests, {"pid": pid}, [process_descriptor])


def _fork(
    request: Mapping[str, object],
    outputs: Sequence[int],
    selector: selectors.BaseSelector,
    template: int,
) -> tuple[int, int]:
    """Return a fork's id and its descriptor."""
    if not outputs:  # the kernel drops what exceeds the limit
        raise OSError(errno.EMFILE, "no descriptor is free")
    leads, has_led = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _run_module(request, outputs[0], (leads, has_led), selector, template)
        os.close(has_led)
        has_led = -1
        os.read(leads, 1)  # its end: signals to the group of the fork reach it from now on
    finally:
        for descriptor in {leads, has_led} - {-1}:
            os.close(descriptor)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _answer(
    requests: socket.socket, answer: Mapping[str, int], descriptors: Sequence[int] = ()
) -> None:
    with suppress(OSError):  # the other end is gone, which the next read shows
        socket.send_fds(requests, [json.dumps(answer).encode()], descriptors)


def _run_module(
    request: Mapping[str, object],
    output: int,
    pipe: Sequence[int],
    selector: selectors.BaseSelector,
    template: int,
) -> NoReturn:
    """Run a module as `python -m` does, with the arguments, environment and output given."""
    code = 1
    try:
        descriptors = [*pipe, *(key.fd for key in selector.get_map().values())]
        selector.close()
        os.setsid()
        module, *arguments = _texts(request["command"])
        environment = request["environment"]
        assert isinstance(environment, dict)
        _redirect_output(output)
        _set_process_title(module, arguments)
        for descriptor in (output, *descriptors):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.environ[SUPERVISOR_VARIABLE] = str(template)
        sys.argv[1:] = arguments
        if (generator := sys.modules.get("numpy.random")) is not None:
            generator.seed()  # its state is otherwise the same in all forks
        sys.modules.pop(f"{module}.__main__", None)  # runpy warns of it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does with what a program raises
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _redirect_output(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((nothing, output, output), _STANDARD, strict=True):
        os.dup2(source, target)
    os.close(nothing)


def _set_process_title(module: str, arguments: Sequence[str]) -> None:
    """Change what `ps` and `pgrep -f` show of this process."""
    words = (sys.executable, "-m", module, *arguments)
    line = b"\0".join(map(os.fsencode, words))
    begin, end = (
        int(stat_fields(os.getpid())[index]) for index in (_ARGUMENTS_FROM, _ARGUMENTS_TO)
    )
    size = end - begin
    if begin and size > 0:
        ctypes.memmove(begin, line[: size - 1].ljust(size, b"\0"), size)


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
