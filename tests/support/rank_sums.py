"""One rank that only gathers the ranks' numbers and shows them; for launchers of any kind."""

from __future__ import annotations

import json
import os
import sys

from services.trainer.learner.ranks import TorchDistributed
from sluice.device.select import select_device


def main() -> int:
    parallel = TorchDistributed(select_device("cpu"), float(sys.argv[1]))
    gathered = parallel.all_gather([float(parallel.rank)], "gathering their numbers")
    if parallel.rank == 0:
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
        sys.stdout.write(json.dumps({"gathered": gathered, "agent_store": agent_store}) + "\n")
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
