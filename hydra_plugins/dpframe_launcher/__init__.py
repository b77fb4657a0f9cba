"""Hydra's way to dpframe's runner. Hydra imports this at every start, so dpframe is not."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher


class DpframeLauncher(Launcher):
    """Hands the points of a sweep to the runner of `dpframe -m`, which is its task function."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.run_batch = task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        return self.run_batch(job_overrides)
