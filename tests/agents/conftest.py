"""These tests start agents of others, which `make test-agents` installs; without them none is
collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if "SLUICE_AGENTS_PYTHON" in os.environ else ["test_*.py"]
