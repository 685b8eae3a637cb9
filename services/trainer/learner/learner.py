"""The learner of one rank: model, optimizer and update. Every rank uses it in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from services.trainer.learner.batch.train_batch import RoutingShape
from services.trainer.learner.checkpoint import CRITIC_FOLDER, resume_remedy
from services.trainer.learner.model.experts import (
    check_native_experts,
    routing_tape,
    without_load_counts,
)
from services.trainer.learner.model.forward import DTYPES, check_packing
from services.trainer.learner.model.loading import (
    check_engine_length,
    load_policy,
    prepare_policy,
)
from services.trainer.learner.model.lora import scaled_for_sending
from services.trainer.learner.model.stages import check_stages_train, keep_stage, own_stage
from services.trainer.learner.model.tensor_cut import check_cuttable
from services.trainer.learner.model.trained_model import (
    ACTOR_SHARDING,
    CRITIC_SHARDING,
    PolicyState,
    TrainedModel,
    load_model_state,
    trained_model,
)
from services.trainer.learner.rank_shares import check_shareable
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import keep_step
from services.trainer.learner.step_measures import MemoryPeaks, StepProfiler
from services.trainer.learner.tensor_layouts import TensorLayouts, local_part
from services.trainer.learner.update.critic import Critic
from services.trainer.learner.update.policy_update import PolicyUpdate
from services.trainer.learner.update.reference import AdapterReference, Reference, ReferencePolicy
from services.trainer.learner.update.settings import update_settings
from sluice.config.derived import max_model_len, max_row_tokens, uses_adapters, uses_critic
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig
from sluice.config.schema.actor import FsdpConfig
from sluice.device.protocol import Device
from sluice.device.select import select_device
from sluice.errors import CheckpointError, ConfigError
from sluice.types import TrainBatch
from sluice.vision.image_prompts import load_image_prompts

KL_CONTROL_FILE = "kl_control.json"

NamedTensors: TypeAlias = Iterator[tuple[str, Tensor]]


def check_precision(key: str, precision: FsdpConfig, device: Device) -> None:
    """Refuse bfloat16 on a device without kernels for it.

    Args:
        key: the section of `precision` in the configuration.

    Raises:
        ConfigError: names key, value and remedy.
    """
    bfloat16_keys = [
        f"{key}.{field}={dtype}"
        for field, dtype in (("dtype", precision.dtype), ("model_dtype", precision.model_dtype))
        if dtype == "bfloat16"
    ]
    if bfloat16_keys and not device.supports_bfloat16():
        remedy = " and ".join(setting.replace("bfloat16", "float32") for setting in bfloat16_keys)
        raise ConfigError(
            f"{' and '.join(bfloat16_keys)}: {device.name} does not compute with bfloat16; "
            f"set {remedy}, or train on another device"
        )


class Learner:
    """The models that one rank trains. Calls block; one thread at a time.

    `rank_command.follow` calls it on ranks above 0.

    Args:
        total_steps: train batches of the whole run, for the learning-rate schedule.
        device: trains the models; by default ``trainer.device``.

    Attributes:
        peaks: memory of this rank's device, by phase of a step.

    Raises:
        ConfigError: a setting is wrong, the model cannot be trained, or ranks loaded different
            weights.
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: ParallelContext,
        total_steps: int,
        device: Device | None = None,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._critic: Critic | None = None
        self._device = device or select_device(config.trainer.device)
        self._device.set_device()
        self.peaks = MemoryPeaks(self._device)
        self._profiler = StepProfiler(config, parallel.rank, self._device.torch_device.type)
        torch.manual_seed(config.trainer.seed)  # equal on all ranks: a new value head is random
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        precision = actor.fsdp_config
        parallel.divide(trainer_layout(config, parallel.world_size))
        check_precision(ACTOR_SHARDING, precision, self._device)
        if uses_critic(config):
            check_precision(CRITIC_SHARDING, config.critic.fsdp, self._device)
        self._policy = self._load_policy(total_steps)
        self._model = self._policy.model
        self._optimizer = self._policy.optimizer
        settings = update_settings(config, self._model.config.get_text_config().vocab_size)
        self._check_packing()
        if uses_critic(config):
            self._critic = Critic(config, parallel, self._device, total_steps)
        self._update = PolicyUpdate(
            settings,
            self._policy,
            parallel,
            self._device,
            peaks=self.peaks,
            reference=self._reference() if settings.needs_reference else None,
            critic=self._critic,
            image_prompts=load_image_prompts(model.path, trust_remote_code=model.trust_remote_code),
        )
        self._check_equal_weights([trained.initial_sum for trained in self._trained_models()])
        self._save_ranks = parallel.in_second_group() if actor.checkpoint.async_save else None

    def _reference(self) -> Reference:
        config, parallel = self._config, self._parallel
        model, precision = (
            config.actor_rollout_ref.model,
            config.actor_rollout_ref.actor.fsdp_config,
        )
        if uses_adapters(model):
            return AdapterReference(self._policy, self._device, parallel)
        max_tokens = max_row_tokens(config.data)
        cut = config.actor_rollout_ref.actor.megatron.override_transformer_config
        return ReferencePolicy(model, precision, self._device, max_tokens, parallel, cut)

    def _check_packing(self) -> None:
        """Try the model on packed tokens, unless it is a stage: those have sluice's layers, which
        tests check."""
        if self._policy.stage is not None:
            return
        with without_load_counts(self._model):
            check_packing(
                self._model,
                DTYPES[self._config.actor_rollout_ref.actor.fsdp_config.dtype],
                self._parallel.naming_failures("trying the model on packed tokens"),
                self._parallel.share,
            )
        self._reshard()  # the check ran without a backward pass

    def _load_policy(self, total_steps: int) -> TrainedModel:
        """Load the policy, check that the run's settings suit it, and share it. Collective."""
        actor, model = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.model
        precision, parallel = actor.fsdp_config, self._parallel
        max_tokens = max_row_tokens(self._config.data)
        policy = load_policy(model, precision, max_tokens, is_sharded=parallel.world_size > 1)
        check_engine_length(policy.model.config, max_model_len(self._config))
        check_cuttable(policy.model, precision.tensor_parallel_size)
        check_shareable(
            precision.ulysses_sequence_parallel_size,
            policy.model.config,
            precision.tensor_parallel_size,
        )
        if (mode := actor.router_replay.mode) != "disabled":
            setting = f"actor_rollout_ref.actor.router_replay.mode={mode}"
            check_native_experts(policy.model, setting, "disabled")
        overrides = actor.megatron.override_transformer_config
        stage = own_stage(policy.model, precision, overrides, parallel)
        first_layer = 0 if stage is None else stage.layers.start
        prepare_policy(policy.model, self._config.actor_rollout_ref, first_layer)
        check_stages_train(policy.model, precision.pipeline_parallel_size, overrides)
        return trained_model(
            keep_stage(policy, stage),
            precision,
            actor.optim,
            parallel,
            total_steps,
            key=ACTOR_SHARDING,
            device=self._device.torch_device,
        )

    @property
    def routing_shape(self) -> RoutingShape | None:
        """Return the policy's sizes for `check_routing`; ``None`` without experts of the trainer's
        own."""
        tape = routing_tape(self._model)
        if tape is None:
            return None
        model = self._model.config.get_text_config()
        return RoutingShape(tape.num_layers, model.num_experts, model.num_experts_per_tok)

    @property
    def layouts(self) -> TensorLayouts:
        """Return which rank holds which part of each of the policy's weights."""
        return self._policy.layouts

    @property
    def saves_in_background(self) -> bool:
        """Return whether checkpoints are written while training continues."""
        return self._save_ranks is not None

    def own_rows(self, batch: TrainBatch, step: int) -> list[int]:
        """Return the numbers of the batch's samples that this rank trains, ascending. Collective.

        Args:
            batch: the same on every rank; tokens may be absent.
        """
        with self._parallel.naming_failures(f"dividing the batch of step {step}"):
            return self._update.own_rows(batch, step)

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Update the policy with one batch. Collective.

        Args:
            batch: the same on every rank, except that each may lack tokens of samples that are not
                among its `own_rows`.
            step: number of the train batch in the run, from 1 (verl's global step).

        Returns:
            metrics by verl's names.
        """
        self._device.set_device()  # of the thread that steps, maybe not that of `__init__`
        with self._parallel.naming_failures(f"training step {step}"):
            with self._profiler.tracing(step) as times:
                metrics = self._update.run(batch, step)
            return {**metrics, **times}

    def named_weights(self) -> NamedTensors:
        """Yield the policy's weights by parameter name, tied ones once, without copying.

        A sharded policy's tensors are DTensors with the shapes of the whole tensors. Those of other
        stages of a pipeline have no memory.
        """
        for name, outlined in self._policy.outline.items():
            yield name, self._policy.parameters.get(name, outlined).detach()

    @property
    def untrained_names(self) -> frozenset[str]:
        """Return the names of the policy's weights that are not trained."""
        return frozenset(name for name, p in self._policy.outline.items() if not p.requires_grad)

    def parts(
        self, names: Iterable[str] | None = None, *, left_out: frozenset[str] = frozenset()
    ) -> NamedTensors:
        """Yield this rank's parts of the policy's weights, in the form in which they are sent.

        An adapter's B is multiplied by its scale (`sluice.weights.adapters`).

        Args:
            names: names of weights that this rank holds; ``None`` for all.
        """
        parameters = self._policy.parameters
        parts = {name: local_part(p) for name, p in parameters.items() if name not in left_out}
        travelling = scaled_for_sending(self._policy.model, parts)
        for name in parts if names is None else names:
            if name in parts:
                yield name, travelling[name]

    def save(self, directory: Path) -> None:
        """Write model, tokenizer, optimizer and random state into `directory` (``actor/``).

        All ranks write, each its parts. A critic is saved in ``critic/`` in the same folder.
        Collective; all ranks see one folder.

        Args:
            directory: a new or empty folder.

        Raises:
            OSError: a rank cannot write.
            DeadlineError, PeerError: a rank did not take part.
        """
        self.begin_save(directory)()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Return the work of `save` as a function. If `saves_in_background`, it may run during
        training.

        It then has copies of this rank's parts on the host, and a separate group of all ranks.
        """
        path = self._config.actor_rollout_ref.model.path
        parallel = self._save_ranks or self._parallel
        states = [
            PolicyState(folder, trained, path, parallel.world_size, copies=self.saves_in_background)
            for trained, folder in self._model_folders(directory)
        ]
        coef = json.dumps({"coef": self._update.kl_controller.coef})

        def parts() -> Iterator[None]:
            # First what all ranks do together.
            for state in states:
                yield from state.write_weights(parallel)
            for state in states:
                yield from state.write_rest(parallel)
            if parallel.rank == 0:
                (directory / KL_CONTROL_FILE).write_text(coef, encoding="utf-8")

        def write() -> None:
            keep_step(parts(), parallel, "writing a checkpoint")
            if parallel.rank == 0:
                for state in states:
                    state.check_files()

        return write

    def load(self, directory: Path, rate_factor: float = 1.0) -> None:
        """Load weights, optimizer and random state that `save` wrote. Collective.

        Args:
            rate_factor: multiplies the scheduled learning rates from now on.

        Raises:
            CheckpointError: files are missing or belong to another model.
        """
        folder = directory.parent / CRITIC_FOLDER
        if self._critic is not None and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is missing: the checkpoint was saved without a critic; set "
                "critic.enable=false, or restart from step 0 with trainer.resume_mode=disable"
            )
        self._reshard()
        # The policy comes last: both restore the random state, and its state is the one to keep.
        sums = [
            load_model_state(folder, trained)
            for trained, folder in reversed(self._model_folders(directory))
        ]
        self._load_kl_control(directory / KL_CONTROL_FILE)
        for trained in self._trained_models():
            trained.optimizer.rate_factor = rate_factor
        self._check_equal_weights(sums)

    def _trained_models(self) -> list[TrainedModel]:
        return [self._policy, *([self._critic.trained] if self._critic else [])]

    def _model_folders(self, actor: Path) -> list[tuple[TrainedModel, Path]]:
        """Return each model of a checkpoint and its folder."""
        models = [(self._policy, actor)]
        if self._critic is not None:
            models.append((self._critic.trained, actor.parent / CRITIC_FOLDER))
        return models

    def _reshard(self) -> None:
        for trained in self._trained_models():
            if trained.shards is not None:
                trained.shards.reshard()

    def _load_kl_control(self, file: Path) -> None:
        if self._update.kl_controller.type != "adaptive":  # the configuration's coefficient holds
            return
        try:
            coef = float(json.loads(file.read_text(encoding="utf-8"))["coef"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}); {resume_remedy(file.parents[1])}; or set "
                "algorithm.kl_ctrl.type=fixed"
            ) from error
        self._update.kl_controller = replace(self._update.kl_controller, coef=coef)

    def _check_equal_weights(self, sums: list[float]) -> None:
        # Ranks read the files separately; a difference would spoil training without any error.
        totals = self._parallel.all_gather([sum(sums)], "comparing the ranks' weights")
        if any(total != totals[0] for total in totals[1:]):
            raise ConfigError(
                f"trainer ranks hold different weights (sums {totals}); give every rank the same "
                "files at actor_rollout_ref.model.path and in the checkpoint folder"
            )
