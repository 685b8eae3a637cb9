"""Generate `sluice/api` from `proto/` with the pinned generator.

`python tools/generate_protos.py` writes into the repository; run it after every change of a proto.
`python tools/generate_protos.py --check` writes nothing and fails if the committed code is not
what the protos give.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
PACKAGE = Path("sluice/api")
GENERATORS = ("python", "mypy", "grpc_python", "mypy_grpc")
MYPY_PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
INIT = '"""Generated from proto/ by tools/generate_protos.py; do not edit."""\n'


def generate(output: Path) -> None:
    """Write the messages, their type stubs and the gRPC stubs below `output`."""
    output.mkdir(parents=True, exist_ok=True)
    flags = [f"--plugin={beside}" for beside in map(_beside_python, MYPY_PLUGINS)]
    flags += ["--mypy_opt=quiet", "--mypy_grpc_opt=quiet"]
    flags += [f"--{generator}_out={output}" for generator in GENERATORS]
    protos = compile_protos(*flags)
    for folder in {PACKAGE, *(parent for name in protos for parent in _packages(Path(name)))}:
        (output / folder / "__init__.py").write_text(INIT, encoding="utf-8")


def compile_protos(*flags: str) -> list[str]:
    """Run protoc on all protos; return their paths below proto/.

    Raises:
        SystemExit: it found a mistake, which it has printed.
    """
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *protos])
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")
    return protos


def _beside_python(program: str) -> Path:
    """The program of this environment, which need not be active."""
    return Path(sys.executable).with_name(program)


def _packages(proto: Path) -> Iterator[Path]:
    """The folders of a proto below the package, which import-linter sees only with __init__.py."""
    yield from (parent for parent in proto.parents if parent.is_relative_to(PACKAGE))


def check() -> int:
    """Compare the committed code with a fresh generation; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        command = ("diff", "-rq", "--exclude=__pycache__", str(PACKAGE), f"{folder}/{PACKAGE}")
        done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode != 0:
        sys.stderr.write("sluice/api is not what proto/ gives: run `make protos` and commit it\n")
    return done.returncode


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        return check()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
