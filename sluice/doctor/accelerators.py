"""Devices that the processes of a run take, against those that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice.device.ascend_checks import AscendDemand, AscendHost, ascend_findings
from sluice.device.ascend_host import ascend_host, has_torch_npu
from sluice.device.cuda_host import VISIBLE_VARIABLE
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning
from sluice.launch.device_share import DeviceShare, device_share, gpu_share


@dataclass(frozen=True, slots=True)
class NpuFacts:
    """An Ascend host, and what the run wants of it.

    Attributes:
        has_package: torch_npu is installed.
        demand: zero devices if no process of the run computes on an NPU.
    """

    host: AscendHost
    has_package: bool
    demand: AscendDemand


def check_npus(examined: Examined) -> Iterator[Finding]:
    """What a process on an NPU looks at when it starts, told before anything starts."""
    share = device_share(examined.config, examined.environment)
    replicas = examined.config.sluice.rollout.replicas
    wanted = share.trainer_ranks + replicas * share.devices_per_replica
    on_device = examined.config.sluice.weights.backend != "gloo"
    engine = examined.config.actor_rollout_ref.rollout.name
    demand = AscendDemand(wanted, on_device, share.devices_per_replica > 0 and engine == "vllm")
    return npu_findings(NpuFacts(ascend_host(examined.environment), has_torch_npu(), demand))


def npu_findings(facts: NpuFacts) -> Iterator[Finding]:
    """Those of `ascend_findings`; where nobody asks for an NPU, none of them ends a run."""
    is_wanted = facts.demand.num_devices > 0
    if not (is_wanted or facts.has_package or facts.host.num_devices):
        yield fine("no NPU is here, and none is asked for")
        return
    found = ascend_findings(facts.host, facts.demand)
    for one in found:
        if one.is_fatal and is_wanted:
            yield problem(one.what, "a process on an NPU refuses to start so", one.remedy)
        else:
            why = "a process on an NPU is slower so, or fails later"
            yield warning(one.what, why, one.remedy)
    if not found:
        yield fine(f"{facts.host.num_devices} NPU(s), torch_npu {facts.host.torch_npu_version}")


def check_gpu_count(examined: Examined) -> Iterator[Finding]:
    """One GPU is for one process."""
    return gpu_count_findings(
        gpu_share(examined.config, examined.environment),
        examined.config.sluice.rollout.replicas,
        collectives_on_device=examined.config.sluice.weights.backend != "gloo",
    )


def gpu_count_findings(
    share: DeviceShare, replicas: int, *, collectives_on_device: bool
) -> Iterator[Finding]:
    """Whether every process has one of its own."""
    wanted = share.trainer_ranks + replicas * share.devices_per_replica
    there = len(share.numbers)
    if wanted == 0:
        yield fine("no process of the run takes a GPU of its own")
    elif share.is_enough_for(replicas):
        yield fine(f"{there} GPU(s) are visible, the run takes {wanted}")
    else:
        report = problem if collectives_on_device else warning
        yield report(
            f"the run takes {wanted} GPUs ({share.trainer_ranks} trainer ranks, {replicas} "
            f"replicas of {share.devices_per_replica}), and {there} are visible",
            "processes would share GPUs, and NCCL takes one for one member of a group only"
            if collectives_on_device
            else "processes would share GPUs and their memory",
            "lower trainer.n_gpus_per_node or sluice.rollout.replicas, make more visible "
            f"({VISIBLE_VARIABLE}), or set sluice.weights.backend=gloo",
        )
