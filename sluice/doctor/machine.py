"""Check the machine against what a run takes: memory, devices, cores, ports, the sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from sluice.config.addresses import configured_ports
from sluice.config.derived import replica_devices, uses_adapters
from sluice.config.memory.rollout import rollout_layout, rollout_memory
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.problems import Severity
from sluice.config.run import RunConfig
from sluice.config.schema.service import SandboxConfig
from sluice.device.ascend_checks import AscendDemand, AscendHost, ascend_findings
from sluice.device.host import (
    CUDA_VISIBLE_VARIABLE,
    ascend_host,
    available_bytes,
    has_torch_npu,
    wants_gpu,
    wants_npu,
)
from sluice.doctor.finding import (
    GIB,
    DoctorContext,
    Finding,
    fine,
    gib,
    problem,
    problem_of_text,
    warning,
)
from sluice.errors import ConfigError, SluiceError
from sluice.launch.device_plan import device_share, gpu_share
from sluice.plan.host import ModelBytes, batch_expert_bytes, has_reference_model, rank_host_bytes
from sluice.plan.launch_plan import local_model
from sluice.rpc.ports import check_bindable
from sluice.sandbox.choice import backend_of, proven_sandbox

# What a process takes before it holds a model: torch, and the vendor's libraries on a device.
BARE_BYTES, BARE_ON_DEVICE_BYTES = GIB // 2, 3 * GIB
# The trainer has two snapshots; a replica holds the base of deltas and a staged copy.
COPIES = 2
# Files that were read or copied lately count as used, but the kernel gives their memory away.


def check_memory(context: DoctorContext) -> Iterator[Finding]:
    """Estimate the host's memory; `sluice config check --device-memory` looks at a device's."""
    if context.shape is None:
        yield warning(
            "the model's memory cannot be estimated",
            "its config.json is not here",
            "give actor_rollout_ref.model.path a folder of this machine",
        )
    else:
        yield memory_finding(available_bytes(), needed_memory(context, context.shape))


def memory_finding(available: int | None, needed_bytes: Mapping[str, float]) -> Finding:
    """Judge whether memory suffices; `available` is in bytes, ``None`` if unknown."""
    total = sum(needed_bytes.values())
    parts = ", ".join(f"{name} {gib(size)}" for name, size in needed_bytes.items())
    free = "an unknown amount" if available is None else gib(available)
    statement = f"{free} free, up to {gib(total)} needed ({parts})"
    if available is None or total <= available:
        return fine(statement)
    return warning(
        statement,
        "the kernel kills the process that asks for the rest",
        "lower sluice.rollout.replicas or the token budgets "
        "(actor_rollout_ref.actor.ppo_max_token_len_per_gpu, "
        "actor_rollout_ref.rollout.max_num_seqs), or take a larger machine or model dtype bfloat16",
    )


def needed_memory(context: DoctorContext, shape: ModelShape) -> dict[str, float]:
    """Return the most bytes that ranks, replicas and the reward service may take on this host.

    A rank may read the whole model before it keeps its shards. What it holds later is what
    `sluice plan` counts; a checkpoint takes no more, as each rank writes its own parts. Each device
    of a replica receives all weights, whichever it keeps. The reward service holds the experts of
    the batch that is trained and of the next one.
    """
    config = context.config
    ranks, replicas = config.trainer.n_gpus_per_node, config.sluice.rollout.replicas
    training, layout = training_layout(config), rollout_layout(config)
    # The wire has the cache's dtype.
    snapshots = COPIES * shape.total_parameters * layout.kv_bytes
    weights = shape.total_parameters * training.master_bytes
    reference = weights / training.shard if has_reference_model(config) else 0.0
    bare, peak = float(BARE_ON_DEVICE_BYTES), 0.0
    if not _is_on_device(config.trainer.device, context):
        bare, peak = BARE_BYTES, guessed_memory(shape, training).peak
    rank = bare + max(peak + rank_bytes_on_host(config, shape), reference + weights)
    replica = float(BARE_ON_DEVICE_BYTES + snapshots * replica_devices(config))
    if not _is_on_device(config.sluice.rollout.device, context):
        engine, memory = config.actor_rollout_ref.rollout, rollout_memory(shape, layout, None)
        # The torch engine keeps as many tokens of ended turns as its slots hold.
        caches = 2 if engine.name == "torch" and engine.enable_prefix_caching else 1
        replica += BARE_BYTES - BARE_ON_DEVICE_BYTES + memory.weights + memory.activations
        replica += caches * memory.kv_of_all_sequences
    return {
        f"{ranks} trainer rank(s)": ranks * rank + snapshots,
        f"{replicas} replica(s)": replicas * replica,
        "reward service": BARE_BYTES + 2 * batch_expert_bytes(config, shape),
    }


def rank_bytes_on_host(config: RunConfig, shape: ModelShape) -> float:
    """Return what a rank holds on the host during a run, by sizes that follow from the shape."""
    training = training_layout(config)
    model = config.actor_rollout_ref.model
    weights = trained = shape.total_parameters * training.master_bytes / training.shard
    if uses_adapters(model):
        adapters = shape.adapter_parameters(model.lora_rank, experts=training.adapts_experts)
        trained = adapters * training.master_bytes / training.shard
        weights = shape.total_parameters * training.compute_bytes / training.shard + trained
    planned = local_model(model.path)
    encoder = None if planned is None else planned.encoder
    return rank_host_bytes(config, shape, ModelBytes(weights, trained, 2 * trained), encoder)


def _is_on_device(name: str | None, context: DoctorContext) -> bool:
    return wants_gpu(name, context.environment) or wants_npu(name, context.environment)


def check_npus(context: DoctorContext) -> Iterator[Finding]:
    """Check what a process on an NPU checks when it starts, before anything starts."""
    config = context.config
    share = device_share(config, context.environment)
    demand = AscendDemand(
        share.num_wanted(config.sluice.rollout.replicas),
        config.sluice.weights.backend != "gloo",
        share.devices_per_replica > 0 and config.actor_rollout_ref.rollout.name == "vllm",
    )
    host = ascend_host(context.environment)
    yield from npu_findings(host, demand, has_package=has_torch_npu())


def npu_findings(host: AscendHost, demand: AscendDemand, *, has_package: bool) -> Iterator[Finding]:
    """Yield the findings of `ascend_findings`; none is a problem if the run needs no NPU."""
    is_wanted = demand.num_devices > 0
    if not (is_wanted or has_package or host.num_devices):
        yield fine("there is no NPU, and the run needs none")
        return
    findings = ascend_findings(host, demand)
    for finding in findings:
        if finding.severity is Severity.ERROR and is_wanted:
            yield problem(finding.statement, "a process on an NPU refuses to start", finding.remedy)
        else:
            yield warning(
                finding.statement, "a process on an NPU is slower, or fails later", finding.remedy
            )
    if not findings:
        yield fine(f"{host.num_devices} NPU(s), torch_npu {host.torch_npu_version}")


def check_gpus(context: DoctorContext) -> Iterator[Finding]:
    """Say how the launch divides this host's devices, or that they do not suffice."""
    plan, replicas = context.devices, context.config.sluice.rollout.replicas
    if plan.shortage:
        yield problem_of_text(plan.shortage, "a process would find no device of its own")
        return
    if plan.line:
        yield fine(plan.line)
        return
    share = gpu_share(context.config, context.environment)
    num_wanted, visible = share.num_wanted(replicas), len(share.numbers)
    if num_wanted <= visible:
        yield fine(f"the run takes {num_wanted} GPU(s) of this host, {visible} are visible")
        return
    yield problem(
        f"the run takes {num_wanted} GPUs ({share.trainer_ranks} trainer ranks, {replicas} "
        f"replicas of {share.devices_per_replica}), and {visible} are visible",
        "processes would share GPUs",
        "lower trainer.n_gpus_per_node or sluice.rollout.replicas, or make more visible "
        f"({CUDA_VISIBLE_VARIABLE})",
    )


def check_cores(context: DoctorContext) -> Iterator[Finding]:
    """Compare trainer ranks on the CPU with its cores."""
    ranks = context.config.trainer.n_gpus_per_node
    if _is_on_device(context.config.trainer.device, context):
        yield fine("trainer ranks are on devices")
    else:
        yield cores_finding(ranks, len(os.sched_getaffinity(0)))


def cores_finding(ranks: int, cores: int) -> Finding:
    """Judge whether every trainer rank has a core."""
    if ranks <= max(cores, 1):
        return fine(f"{ranks} trainer rank(s) on {cores} CPU core(s)")
    return warning(
        f"trainer.n_gpus_per_node = {ranks}: no GPU is used, and {ranks} trainer ranks share "
        f"{cores} CPU core(s)",
        "each rank holds the whole run's collectives and a process of its own, and gains nothing",
        f"set trainer.n_gpus_per_node={max(cores // 2, 1)}, or make GPUs visible",
    )


def check_ports(context: DoctorContext) -> Iterator[Finding]:
    """Bind each fixed port for a moment; nothing listens."""
    ports = list(configured_ports(context.config.sluice))
    free = []
    for key, host, port in ports:
        try:
            check_bindable(host, port)
            free.append(str(port))
        except ConfigError as error:
            message, _, remedy = str(error).partition("; ")
            yield problem(
                f"{key} = {port}: {message}",
                "the service that listens there refuses to start",
                f"{remedy} (`ss -ltnp` lists processes)",
            )
    if len(free) == len(ports):
        yield fine(f"free: {', '.join(free)}" if ports else "the run chooses all ports")


def check_sandbox(context: DoctorContext) -> Iterator[Finding]:
    """Run a program of one line in the configured sandbox; without a run, in bubblewrap."""
    sandbox, fusion = context.config.sluice.sandbox, context.config.reward.sandbox_fusion
    backend = backend_of(sandbox, fusion)
    if backend is not None:
        try:
            proven_sandbox(sandbox, fusion)
        except SluiceError as error:
            yield problem_of_text(
                f"sluice.sandbox.backend = {backend}: {error}", "the run refuses to start"
            )
        else:
            yield fine(f"{backend} runs programs")
    elif not context.has_run:
        try:
            proven_sandbox(SandboxConfig(backend="bubblewrap"))
        except SluiceError as error:
            yield fine(f"no sandbox for programs by sluice.sandbox.backend=bubblewrap: {error}")
        else:
            yield fine("bubblewrap can run programs (sluice.sandbox.backend=bubblewrap)")
