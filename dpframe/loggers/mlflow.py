"""MLflow: the server or database of `MLFLOW_TRACKING_URI`, else MLflow's own choice."""

import re
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpframe.loggers.base import Logger, Scalar, read_id, require, tags_of, write_id
from dpframe.loggers.formats import file_name

AT_ONCE = 100  # numbers or parameters in one request


class MLflow(Logger):
    """MLflow keeps all that it was given: what a resumed run logs again is not sent again."""

    needs_directory = True

    def __init__(self, *, experiment: str | None = None, name: str | None = None) -> None:
        require("mlflow")
        self.experiment = experiment
        self.name = name
        self.run_id = ""
        self.reset()

    def reset(self) -> None:
        self._waiting: list[Any] = []  # metrics
        self._sent: set[tuple[str, int]] = set()  # the names and steps of a run that is resumed

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        path = Path(run_dir) / "mlflow-id.txt"
        self.run_id = self._resume(read_id(path)) or write_id(path, self._begin(run_dir, hparams))
        self.client.log_text(self.run_id, config, "config.yaml")

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name, value in scalars.items():
            if (key(name), step) not in self._sent:
                self._waiting.append(Metric(key(name), value, now, step))

    def flush(self) -> None:
        while self._waiting:
            self.client.log_batch(self.run_id, metrics=self._waiting[:AT_ONCE])
            del self._waiting[:AT_ONCE]

    def media_file(
        self, kind: str, name: str, suffix: str, encode: Callable[[], bytes], *, step: int
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / file_name(name, step, suffix)
            path.write_bytes(encode())
            self.client.log_artifact(self.run_id, str(path), kind)

    def dashboard(self, run_dir: str) -> str:
        from mlflow import get_tracking_uri

        store = get_tracking_uri()
        if store.startswith(("http:", "https:")):
            return store  # a server, which has a page
        return f"mlflow ui --backend-store-uri {shlex.quote(store)}"

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        self.flush()
        self.client.set_terminated(self.run_id, "FINISHED" if succeeded else "FAILED")

    def _resume(self, run_id: str) -> str:
        """'' if this store does not know the run."""
        from mlflow.exceptions import MlflowException

        try:
            names = self.client.get_run(run_id).data.metrics if run_id else {}
        except MlflowException:
            return ""
        for name in names:
            history = self.client.get_metric_history(run_id, name)
            self._sent |= {(name, metric.step) for metric in history}
        if run_id:
            self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(self, run_dir: str, hparams: dict[str, Scalar]) -> str:
        from mlflow.entities import Param

        name = self.experiment or str(hparams.get("recipe", "dpframe"))
        there = self.client.get_experiment_by_name(name)
        experiment = there.experiment_id if there else self.client.create_experiment(name)
        run_name = self.name or str(hparams.get("name", Path(run_dir).resolve().name))
        tags = dict.fromkeys(map(key, tags_of(hparams)), "true")
        if "notes" in hparams:
            tags["mlflow.note.content"] = str(hparams["notes"])
        run_id = self.client.create_run(experiment, tags=tags, run_name=run_name).info.run_id
        parameters = [Param(key(name), str(value)) for name, value in hparams.items()]
        for first in range(0, len(parameters), AT_ONCE):
            self.client.log_batch(run_id, params=parameters[first : first + AT_ONCE])
        return run_id


def key(name: str) -> str:
    """The name with the letters that MLflow allows."""
    return re.sub(r"[^\w. /-]", "_", name)
