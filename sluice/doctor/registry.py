"""Every check of `sluice doctor`, in the order in which they are told."""

from __future__ import annotations

from sluice.doctor import (
    data_files,
    model_directory,
    reward_function,
    torch_build,
)
from sluice.doctor.accelerators import check_gpu_count, check_npus
from sluice.doctor.certificates import check_certificates
from sluice.doctor.clock import check_clock
from sluice.doctor.configuration import check_configuration
from sluice.doctor.cpu_threads import check_threads
from sluice.doctor.disk_space import check_disk
from sluice.doctor.engine_versions import check_engine
from sluice.doctor.examination import Check
from sluice.doctor.extras import check_extras
from sluice.doctor.generated_code import check_generated_code
from sluice.doctor.host_memory import check_memory
from sluice.doctor.network_interfaces import check_network
from sluice.doctor.open_files import check_open_files
from sluice.doctor.ports import check_ports
from sluice.doctor.python_version import check_python
from sluice.doctor.requirements import check_requirements
from sluice.doctor.shared_memory import check_shared_memory

CHECKS: tuple[Check, ...] = (
    Check("python", "the interpreter", check_python),
    Check("packages", "what every process imports", check_requirements),
    Check("generated-code", "gRPC and protobuf", check_generated_code),
    Check(
        "torch",
        "torch, the driver and the GPUs",
        torch_build.check_torch,
        deadline_s=torch_build.DEADLINE_S,
    ),
    Check("npu", "NPUs, CANN and their variables", check_npus),
    Check("open-files", "the limit of open files", check_open_files),
    Check("network", "the networks of collectives", check_network),
    Check("clock", "this machine's clock", check_clock),
    Check("configuration", "the configuration's rules", check_configuration, needs_run=True),
    Check("extras", "optional packages", check_extras, needs_run=True),
    Check("gpus", "GPUs for every process", check_gpu_count, needs_run=True),
    Check("engine", "the inference engine", check_engine, needs_run=True),
    Check(
        "model",
        "the model's folder",
        model_directory.check_model,
        needs_run=True,
        deadline_s=model_directory.DEADLINE_S,
    ),
    Check(
        "data",
        "the files of prompts",
        data_files.check_data,
        needs_run=True,
        deadline_s=data_files.DEADLINE_S,
    ),
    Check(
        "reward",
        "what grades responses",
        reward_function.check_reward,
        needs_run=True,
        deadline_s=reward_function.DEADLINE_S,
    ),
    Check("memory", "the host's memory", check_memory, needs_run=True),
    Check("cpus", "CPUs for every thread", check_threads, needs_run=True),
    Check("shared-memory", "shared memory (/dev/shm)", check_shared_memory, needs_run=True),
    Check("disk", "room for checkpoints", check_disk, needs_run=True),
    Check("ports", "fixed ports", check_ports, needs_run=True),
    Check("security", "certificates and tokens", check_certificates, needs_run=True),
)
