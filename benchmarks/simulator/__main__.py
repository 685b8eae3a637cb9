"""Set a run beside its simulation: `python -m benchmarks.simulator RUN`.

docs/simulator.md has what is fitted. The last line printed is one JSON object: `twin_error`, by
figure, and `figures` with both values of each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import print_report
from benchmarks.simulator.fit import fitted_simulation
from benchmarks.simulator.twin import twin, twin_as_json
from sluice.errors import SluiceError
from tools.phases import tool_parser


def main(arguments: Sequence[str]) -> int:
    """Fit and simulate; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.simulator runs/quickstart")
    parser.add_argument("run", type=Path, help="folder of a run")
    try:
        fitted, settings = fitted_simulation(parser.parse_args(arguments).run)
        return print_report(twin_as_json(twin(fitted, settings)))
    except SluiceError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
