"""All rules that one running engine can be asked for, in any order."""

from __future__ import annotations

from tests.support.engine_contract import DrawingContract
from tests.support.engine_contract_pause import PauseContract
from tests.support.engine_contract_priority import PriorityContract
from tests.support.engine_contract_stops import StopStringContract
from tests.support.engine_contract_weights import UpdateContract


class RunningContract(
    DrawingContract, StopStringContract, PauseContract, PriorityContract, UpdateContract
):
    """What an adapter's test module derives its class from; it gives the fixture `world`."""
