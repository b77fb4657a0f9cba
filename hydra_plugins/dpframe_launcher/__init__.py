"""Hydra's way to dpframe's runner. Hydra imports this at every start, so dpframe is not."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher


class DpframeLauncher(Launcher):
    """Runs the points of a sweep as `sweep.jobs` says; `dpframe -m` has it for Hydra's own one."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.runner = task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        return self.runner.launch(job_overrides)
