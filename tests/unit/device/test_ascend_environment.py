"""Variables for processes on NPUs, from the configuration and what is set already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.run import RunConfig, changed
from sluice.device.ascend_environment import (
    hccl_environment,
    hccl_group_config,
    import_environment,
    single_interface,
)

_NOTHING: dict[str, str] = {}
_NAMES = (
    "GLOO_SOCKET_IFNAME",
    "HCCL_ASYNC_ERROR_HANDLING",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME",
    "HCCL_WHITELIST_DISABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


def environment_of(
    given: dict[str, str] = _NOTHING,
    *,
    transfer_s: float = 30.0,
    collective_s: float = 120.0,
    host: str = "10.1.2.3",
) -> dict[str, str]:
    settings = (
        f"sluice.weights.timeout_s={transfer_s}",
        f"sluice.trainer.command_timeout_s={collective_s}",
        f"sluice.trainer.endpoint.advertise={host}",
    )
    config = changed(RunConfig(), settings)
    return hccl_environment(config, config.sluice.trainer.endpoint, given)


def test_a_process_on_an_npu_gets_every_variable_it_needs() -> None:
    assert environment_of() == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "120",
        "HCCL_EXEC_TIMEOUT": "120",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_WHITELIST_DISABLE": "1",
        "HCCL_IF_IP": "10.1.2.3",
    }


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(["0", "1", "=eth0", "7"])))
def test_what_is_set_is_never_set_again(environment: dict[str, str]) -> None:
    assert not environment.keys() & environment_of(environment).keys()


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6))
def test_deadlines_are_whole_seconds_that_hccl_takes_and_none_is_shortened_within_them(
    transfer_s: float, collective_s: float
) -> None:
    found = environment_of(transfer_s=transfer_s, collective_s=collective_s)
    connect_s, exec_s = int(found["HCCL_CONNECT_TIMEOUT"]), int(found["HCCL_EXEC_TIMEOUT"])
    assert 120 <= connect_s <= 7200
    assert 68 <= exec_s <= 17340
    assert connect_s >= min(transfer_s, 7200)
    assert exec_s >= min(max(transfer_s, collective_s), 17340)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "trainer.cluster.local"])
def test_a_host_that_is_no_address_others_reach_leaves_the_choice_to_hccl(host: str) -> None:
    assert "HCCL_IF_IP" not in environment_of(host=host)


def test_the_interface_that_is_chosen_for_hccl_is_glooss_too_and_no_address_overrules_it() -> None:
    found = environment_of({"HCCL_SOCKET_IFNAME": "=eth1"})
    assert found["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "HCCL_IF_IP" not in found


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("=eth0", "eth0"), ("eth", ""), ("^docker", ""), ("=eth0,eth1", ""), ("^=lo", ""), ("", "")],
)
def test_only_a_whole_name_is_one_interface(pattern: str, name: str) -> None:
    assert single_interface(pattern) == name


def test_a_whitelist_of_the_users_stays() -> None:
    assert "HCCL_WHITELIST_DISABLE" not in environment_of({"HCCL_WHITELIST_FILE": "/etc/hccl.json"})


def test_torch_does_not_load_the_npu_where_torch_npu_is_installed() -> None:
    variable = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert import_environment(has_torch_npu=True, environment={}) == variable
    assert import_environment(has_torch_npu=False, environment={}) == {}
    assert (
        import_environment(has_torch_npu=True, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
        == {}
    )


@pytest.mark.parametrize(
    ("num_bytes", "buffer_mb"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (64 << 20, 64)]
)
def test_a_groups_buffer_holds_its_largest_collective(num_bytes: int, buffer_mb: int) -> None:
    assert hccl_group_config(num_bytes, {}) == {"hccl_buffer_size": buffer_mb}
    assert hccl_group_config(num_bytes, {"HCCL_BUFFSIZE": "8"}) == {}
    assert hccl_group_config(0, {}) == {}
    assert hccl_group_config(1 << 40, {}) == {"hccl_buffer_size": 2048}
