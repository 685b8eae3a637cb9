"""The learner of one rank: model, optimizer and the update, used the same way on every rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.learner.critic import Critic
from services.trainer.learner.critic_settings import critic_settings, uses_critic
from services.trainer.learner.model import load_policy
from services.trainer.learner.optimizer import PolicyOptimizer
from services.trainer.learner.packing_probe import check_packing
from services.trainer.learner.parallel import DataParallel
from services.trainer.learner.policy_state import load_policy_state, save_policy_state
from services.trainer.learner.reference import ReferencePolicy
from services.trainer.learner.update import PolicyUpdate, Replica
from services.trainer.learner.update_settings import update_settings
from sluice.config.run import RunConfig
from sluice.device.protocol import Device
from sluice.device.select import select_device
from sluice.errors import CheckpointError, ConfigError
from sluice.types import TrainBatch

logger = logging.getLogger(__name__)

CRITIC_FOLDER = "critic"  # beside the policy's
KL_CONTROL_FILE = "kl_control.json"


class Learner:
    """Blocking; not thread-safe. Ranks above 0 are driven by `rank_command.follow`.

    Args:
        config: the run.
        parallel: this rank's place; `SingleProcess` for one rank.
        total_steps: train batches of the whole run, for the learning-rate schedule.
        device: where to train; by default as ``trainer.device`` says.

    Raises:
        ConfigError: a setting is wrong, or the model cannot be trained; or ranks loaded
            different weights.
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: DataParallel,
        total_steps: int,
        device: Device | None = None,
    ) -> None:
        self._config, self._parallel = config, parallel
        self._device = device or select_device(config.trainer.device)
        self._device.set_device()
        torch.manual_seed(config.trainer.seed)
        max_tokens = config.data.max_prompt_length + config.data.max_response_length
        model, precision = (
            config.actor_rollout_ref.model,
            config.actor_rollout_ref.actor.fsdp_config,
        )
        self._model = load_policy(model, precision, self._device.torch_device, max_tokens)
        settings = update_settings(config, self._model.config.get_text_config().vocab_size)
        check_packing(self._model)
        self._optimizer = PolicyOptimizer(
            dict(self._model.named_parameters()),
            config.actor_rollout_ref.actor.optim,
            total_steps,
        )
        reference = None
        if settings.needs_reference:
            reference = ReferencePolicy(model, precision, self._device, max_tokens)
        self._critic: Critic | None = None
        if uses_critic(config):
            self._critic = Critic(critic_settings(config), parallel, self._device, total_steps)
        self._update = PolicyUpdate(
            Replica(self._model, self._optimizer, parallel, self._device, reference, self._critic),
            settings,
        )
        self._check_equal_weights()

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Update the policy with one batch. Collective.

        Args:
            batch: the same on every rank.
            step: number of the train batch in the run, from 1 (verl's global step).

        Returns:
            metrics by verl's names.
        """
        return self._update.run(batch, step)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by the model's parameter names, tied ones once, on the device, not copied."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def save(self, directory: Path) -> None:
        """Write model, tokenizer, optimizer and random state into `directory` (``actor/``).

        A critic goes into ``critic/`` beside it.
        """
        path = self._config.actor_rollout_ref.model.path
        save_policy_state(directory, self._model, self._optimizer, path)
        coef = self._update.kl_controller.coef
        (directory / KL_CONTROL_FILE).write_text(json.dumps({"coef": coef}), encoding="utf-8")
        if self._critic is not None:
            folder = directory.parent / CRITIC_FOLDER
            save_policy_state(folder, self._critic.model, self._critic.optimizer, path)

    def load(self, directory: Path) -> None:
        """Replace weights, optimizer and random state by what `save` wrote. Collective.

        Raises:
            CheckpointError: files are missing or belong to another model.
        """
        if self._critic is not None:
            folder = directory.parent / CRITIC_FOLDER
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is missing: the checkpoint was saved without a critic; set "
                    "critic.enable=false, or start anew with trainer.resume_mode=disable"
                )
            load_policy_state(folder, self._critic.model, self._critic.optimizer)
        load_policy_state(directory, self._model, self._optimizer)
        self._load_kl_control(directory / KL_CONTROL_FILE)
        self._check_equal_weights()

    def _load_kl_control(self, file: Path) -> None:
        try:
            coef = float(json.loads(file.read_text(encoding="utf-8"))["coef"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}); choose another checkpoint"
            ) from error
        self._update.kl_controller = replace(self._update.kl_controller, coef=coef)

    def _check_equal_weights(self) -> None:
        sums = [float(weight.double().sum()) for _, weight in self.named_weights()]
        if self._critic is not None:
            sums += [float(p.detach().double().sum()) for p in self._critic.model.parameters()]
        totals = self._parallel.all_gather([sum(sums)], "comparing the ranks' weights")
        if any(other != totals[0] for other in totals[1:]):
            raise ConfigError(
                f"trainer ranks hold different weights (sums {totals}); give every rank the same "
                "files at actor_rollout_ref.model.path and in the checkpoint folder"
            )
