"""The reward service and the simulator use the algorithms without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALGORITHM = Path(__file__).resolve().parents[3] / "sluice" / "algorithm"
ON_TORCH = {"kl", "token_statistics"}
# All other files of these packages are on torch.
PLAIN_IN_TORCH_PACKAGES = {
    "advantages",
    "losses",
    "losses.settings",
    "rollout_correction",
    "rollout_correction.settings",
}


def test_numpy_files_never_import_torch() -> None:
    paths = [path.relative_to(ALGORITHM).with_suffix("") for path in ALGORITHM.rglob("*.py")]
    names = {
        ".".join(path.parts).removesuffix(".__init__").removesuffix("__init__") for path in paths
    }
    assert names >= ON_TORCH | PLAIN_IN_TORCH_PACKAGES
    packages = {name.split(".")[0] for name in PLAIN_IN_TORCH_PACKAGES}
    packaged = {name for name in names if name.split(".")[0] in packages}
    plain = names - ON_TORCH - (packaged - PLAIN_IN_TORCH_PACKAGES)
    lines = [f"import sluice.algorithm.{name}".rstrip(".") for name in sorted(plain)]
    lines += ["import sys", "assert 'torch' not in sys.modules"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ALGORITHM.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
