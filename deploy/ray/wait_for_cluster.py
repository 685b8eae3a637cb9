"""Wait until a Ray cluster is complete.

`wait_for_cluster.py --address HOST:PORT --nodes 4 --resource NPU=32`: exit code 0 once so many
nodes have joined with so much of each resource; 1 after --timeout, with what is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

_INTERVAL_S = 2.0


def missing(
    nodes: Sequence[Mapping[str, object]],
    resources: Mapping[str, float],
    num_nodes: int,
    wanted: Mapping[str, float],
) -> list[str]:
    """Return what has not joined yet.

    Args:
        nodes: as `ray.nodes()` gives them.
        resources: of all nodes together.
        num_nodes, wanted: what there shall be.
    """
    alive = [str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
    found = []
    if len(alive) < num_nodes:
        found.append(f"nodes: {len(alive)} of {num_nodes} ({', '.join(sorted(alive))})")
    found += [
        f"{name}: {resources.get(name, 0):g} of {amount:g}"
        for name, amount in wanted.items()
        if resources.get(name, 0) < amount
    ]
    return found


def main(arguments: Sequence[str]) -> int:
    """Wait; return the exit code."""
    options = _parse(arguments)
    import ray

    ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    until_s, wanted = time.monotonic() + options.timeout, dict(options.resource)
    shown: list[str] = []
    while lacking := missing(ray.nodes(), ray.cluster_resources(), options.nodes, wanted):
        if lacking != shown:
            sys.stderr.write(f"waiting for {'; '.join(lacking)}\n")
            shown = lacking
        if time.monotonic() > until_s:
            sys.stderr.write(f"not within {options.timeout:g} s\n")
            return 1
        time.sleep(_INTERVAL_S)
    sys.stderr.write(f"the cluster is complete: {dict(ray.cluster_resources())}\n")
    return 0


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    return name, float(amount)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Waits until a Ray cluster is complete.",
        epilog="example: wait_for_cluster.py --address 10.0.0.1:6379 --nodes 4 --resource NPU=32",
    )
    parser.add_argument("--address", default="auto", help="of the head")
    parser.add_argument("--nodes", type=int, default=1, help="how many there shall be")
    parser.add_argument(
        "--resource", type=_resource, action="append", default=[], help="NAME=AMOUNT in all"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
