"""Make the torchvision of this environment importable beside a torch for the CPU.

There is no build of torchvision for it: that of the package index registers shapes of kernels that
its library, made for CUDA, cannot bring, and fails. vLLM's image models need the transforms alone,
which are Python. So these registrations are taken out of the installed copy; repeating it is
harmless. For test environments:

.venv-vllm/bin/python tools/torchvision_for_cpu.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_REGISTRATION = re.compile(r'^@torch\.library\.register_fake\("torchvision::\w+"\)\n', re.MULTILINE)


def main() -> int:
    """The exit status: 0 if torchvision can be imported afterwards."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        sys.stderr.write(
            f"torchvision is not installed for {sys.executable}; install it without its "
            "requirements: pip install --no-deps torchvision\n"
        )
        return 1
    path = Path(found.origin).parent / "_meta_registrations.py"
    path.write_text(without_registrations(path.read_text(encoding="utf-8")), encoding="utf-8")
    return subprocess.run([sys.executable, "-c", "import torchvision"], check=False).returncode


def without_registrations(source: str) -> str:
    """The source without the registrations that fail beside a torch for the CPU."""
    return _REGISTRATION.sub("", source)


if __name__ == "__main__":
    sys.exit(main())
