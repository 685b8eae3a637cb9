"""These tests start harnesses of others, which `make test-harness` installs; without them none is
collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = ["tasks/*"]
if "SLUICE_HARNESS_PYTHON" not in os.environ:
    collect_ignore_glob.append("test_*.py")
