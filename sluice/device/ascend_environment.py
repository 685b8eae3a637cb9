"""Environment variables that CANN, HCCL and torch_npu need, as a function of the configuration.

HCCL reads them when it makes a communicator, so they must be set when a process starts. Variables
that are set already always stay. Loads no torch. Meanings and ranges: CANN's "Environment Variable
Reference" and torch_npu's; every variable is explained in ``docs/npu.md``.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping

from sluice.config.addresses import advertised_host
from sluice.config.deadlines import command_timeout_s
from sluice.config.run import RunConfig
from sluice.config.schema.service import EndpointConfig

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
ASYNC_ERRORS_VARIABLE = "HCCL_ASYNC_ERROR_HANDLING"
BUFFER_VARIABLE = "HCCL_BUFFSIZE"
CONNECT_VARIABLE = "HCCL_CONNECT_TIMEOUT"
EXEC_VARIABLE = "HCCL_EXEC_TIMEOUT"
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
HOST_ADDRESS_VARIABLE = "HCCL_IF_IP"
HOST_INTERFACE_VARIABLE = "HCCL_SOCKET_IFNAME"
QUEUE_VARIABLE = "TASK_QUEUE_ENABLE"
VISIBLE_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
WHITELIST_VARIABLE = "HCCL_WHITELIST_DISABLE"
WHITELIST_FILE_VARIABLE = "HCCL_WHITELIST_FILE"

CONNECT_RANGE_S = (120, 7200)
EXEC_RANGE_S = (68, 17340)
BUFFER_RANGE_MB = (1, 2048)

_NO_AUTOLOAD = {AUTOLOAD_VARIABLE: "0"}


def hccl_environment(
    config: RunConfig, endpoint: EndpointConfig, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add to `environment` for a process that computes on an NPU.

    Args:
        environment: that of the process; none of its variables is in the result.
    """
    transfer_s = config.sluice.weights.timeout_s
    waits_s = max(transfer_s, command_timeout_s(config))
    wanted = {
        **_NO_AUTOLOAD,
        CONNECT_VARIABLE: str(_round_into(transfer_s, CONNECT_RANGE_S)),
        EXEC_VARIABLE: str(_round_into(waits_s, EXEC_RANGE_S)),
        # HCCL's watchdog ends the process when a collective is late. A transfer group keeps its own
        # deadlines, and its processes outlive it.
        ASYNC_ERRORS_VARIABLE: "0",
    }
    if WHITELIST_FILE_VARIABLE not in environment:
        wanted[WHITELIST_VARIABLE] = "1"
    wanted |= _host_network(advertised_host(endpoint), environment)
    return {name: value for name, value in wanted.items() if name not in environment}


def queue_environment(*, captures_graphs: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Return how torch_npu queues operators in a process that computes on an NPU.

    Level 2 hides more of the host's work, and torch_npu refuses to capture graphs with it. Without
    the variable it is 1.

    Args:
        captures_graphs: whether vLLM does in this process or those that it starts.
        environment: that of the process; none of its variables is in the result.
    """
    return {} if captures_graphs or QUEUE_VARIABLE in environment else {QUEUE_VARIABLE: "2"}


def import_environment(*, has_torch_npu: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment` for any process that loads torch.

    torch imports an installed torch_npu while it is imported, and without CANN that fails, also
    where no NPU is configured.
    """
    wanted = _NO_AUTOLOAD if has_torch_npu else {}
    return {name: value for name, value in wanted.items() if name not in environment}


def hccl_group_config(bucket_bytes: int, environment: Mapping[str, str]) -> dict[str, int]:
    """Return HCCL's options for one transfer group.

    A communicator takes two buffers of HCCL_BUFFSIZE (by default 200 MB each) from the NPU's
    memory. Buffers larger than a bucket are of no use.

    Args:
        bucket_bytes: of the largest collective; 0 leaves the choice to HCCL.
        environment: that of the process; HCCL_BUFFSIZE in it holds for this group, too.
    """
    if bucket_bytes == 0 or BUFFER_VARIABLE in environment:
        return {}
    return {"hccl_buffer_size": _round_into(bucket_bytes / (1 << 20), BUFFER_RANGE_MB)}


def _host_network(own_host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose the host's network for HCCL and Gloo.

    By default both take the first that suits them, and on hosts with several networks that is not
    the same one everywhere.
    """
    variables = {}
    interface = single_interface(environment.get(HOST_INTERFACE_VARIABLE, ""))
    if interface:
        variables[GLOO_INTERFACE_VARIABLE] = interface
    elif _is_reachable_address(own_host):
        variables[HOST_ADDRESS_VARIABLE] = own_host
    return variables


def single_interface(pattern: str) -> str:
    """Return the interface that a value of HCCL_SOCKET_IFNAME names, or nothing.

    HCCL takes lists, prefixes (``eth``) and exclusions (``^docker``); Gloo takes one name. Only
    ``=eth0`` is certain to mean one name.
    """
    name = pattern.removeprefix("=")
    is_one = pattern.startswith("=") and not set(name) & set(",^=")
    return name if is_one else ""


def _is_reachable_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _round_into(value: float, limits: tuple[int, int]) -> int:
    lowest, highest = limits
    return min(max(math.ceil(value), lowest), highest)
