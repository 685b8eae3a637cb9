"""All rules that one running engine can be asked for, in any order."""

from __future__ import annotations

from tests.support.engine_contract import PriorityContract, SamplingContract, StopStringContract
from tests.support.engine_contract_weights import UpdateContract


class RunningContract(SamplingContract, StopStringContract, PriorityContract, UpdateContract):
    """What an adapter's test module derives its class from; it gives the fixture `world`."""
