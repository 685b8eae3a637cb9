"""Sink for an MLflow server, or for MLflow's local files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from services.trainer.metrics.sinks import TABLE_COLUMNS, mlflow_name

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import Example, SinkTarget

# MLflow's limits for one call and one value.
_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100
_LONGEST_PARAM = 500


class MlflowSink:
    """One run in the experiment named after the project, at ``MLFLOW_TRACKING_URI``.

    Without that variable, MLflow writes files to ``<run dir>/mlruns``.
    """

    def __init__(self, target: SinkTarget) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow requires this confirmation before it uses plain files instead of a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (target.run_dir.absolute() / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(target.project)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(target.project)
        )
        run = self._client.create_run(experiment_id, run_name=target.experiment)
        self._run_id: str = run.info.run_id
        params = [
            Param(mlflow_name(name), str(value)[:_LONGEST_PARAM])
            for name, value in target.settings.items()
        ]
        for start in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_A_CALL])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; as under verl, ``@`` in a name becomes ``_at_``."""
        now_ms = int(time.time() * 1000)
        rows = [Metric(mlflow_name(n), float(v), now_ms, step) for n, v in metrics.items()]
        for start in range(0, len(rows), _METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=rows[start : start + _METRICS_A_CALL])

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log a table as the artifact ``val_generations/<step>.json``."""
        rows = [[step, example.prompt, example.response, example.score] for example in examples]
        table = {"columns": list(TABLE_COLUMNS), "data": rows}
        self._client.log_dict(self._run_id, table, f"val_generations/{step}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)
