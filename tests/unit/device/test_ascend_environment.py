"""Variables for processes on NPUs, from the configuration and what is set already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.loading.loader import load_config
from sluice.device.ascend_environment import (
    HcclSettings,
    hccl_environment,
    hccl_group_config,
    hccl_settings,
    import_environment,
    single_interface,
)

_SETTINGS = HcclSettings(transfer_timeout_s=30.0, collective_timeout_s=120.0, own_host="10.1.2.3")
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


def test_a_process_on_an_npu_gets_every_variable_it_needs() -> None:
    assert hccl_environment(_SETTINGS, {}) == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "120",
        "HCCL_EXEC_TIMEOUT": "120",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_WHITELIST_DISABLE": "1",
        "HCCL_IF_IP": "10.1.2.3",
    }


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(["0", "1", "=eth0", "7"])))
def test_what_is_set_is_never_set_again(environment: dict[str, str]) -> None:
    assert not environment.keys() & hccl_environment(_SETTINGS, environment).keys()


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6))
def test_deadlines_are_whole_seconds_that_hccl_takes_and_none_is_shortened_within_them(
    transfer_s: float, collective_s: float
) -> None:
    found = hccl_environment(HcclSettings(transfer_s, collective_s, "host"), {})
    connect_s, exec_s = int(found["HCCL_CONNECT_TIMEOUT"]), int(found["HCCL_EXEC_TIMEOUT"])
    assert 120 <= connect_s <= 7200
    assert 68 <= exec_s <= 17340
    assert connect_s >= min(transfer_s, 7200)
    assert exec_s >= min(max(transfer_s, collective_s), 17340)


def test_the_settings_are_those_of_the_configuration() -> None:
    config = load_config(
        None,
        [
            "sluice.weights.timeout_s=200",
            "sluice.trainer.command_timeout_s=90",
            "sluice.trainer.endpoint.advertise=10.0.0.9:7000",
        ],
    )
    settings = hccl_settings(config, config.sluice.trainer.endpoint)
    assert settings == HcclSettings(200.0, 90.0, "10.0.0.9")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "trainer.cluster.local"])
def test_a_host_that_is_no_address_others_reach_leaves_the_choice_to_hccl(host: str) -> None:
    assert "HCCL_IF_IP" not in hccl_environment(HcclSettings(30, 30, host), {})


def test_the_interface_that_is_chosen_for_hccl_is_glooss_too_and_no_address_overrules_it() -> None:
    found = hccl_environment(_SETTINGS, {"HCCL_SOCKET_IFNAME": "=eth1"})
    assert found["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "HCCL_IF_IP" not in found


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("=eth0", "eth0"), ("eth", ""), ("^docker", ""), ("=eth0,eth1", ""), ("^=lo", ""), ("", "")],
)
def test_only_a_whole_name_is_one_interface(pattern: str, name: str) -> None:
    assert single_interface(pattern) == name


def test_a_whitelist_of_the_users_stays() -> None:
    assert "HCCL_WHITELIST_DISABLE" not in hccl_environment(
        _SETTINGS, {"HCCL_WHITELIST_FILE": "/etc/hccl.json"}
    )


def test_torch_does_not_load_the_npu_where_torch_npu_is_installed() -> None:
    variable = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert import_environment(has_torch_npu=True, given={}) == variable
    assert import_environment(has_torch_npu=False, given={}) == {}
    assert (
        import_environment(has_torch_npu=True, given={"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}) == {}
    )


@pytest.mark.parametrize(
    ("num_bytes", "buffer_mb"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (64 << 20, 64)]
)
def test_a_groups_buffer_holds_its_largest_collective(num_bytes: int, buffer_mb: int) -> None:
    assert hccl_group_config(num_bytes, {}) == {"hccl_buffer_size": buffer_mb}
    assert hccl_group_config(num_bytes, {"HCCL_BUFFSIZE": "8"}) == {}
    assert hccl_group_config(0, {}) == {}
    assert hccl_group_config(1 << 40, {}) == {"hccl_buffer_size": 2048}
