"""`mode=verify`: a config's recipe and strategy in the conformance kit."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dpframe.cli.build import build
from dpframe.cli.compose import Composed
from dpframe.cli.directory import Directory
from dpframe.cli.slots import trust_of
from dpframe.data import DataModule
from dpframe.errors import UserError, printable
from dpframe.strategies import Strategy
from dpframe.task import Task
from dpframe.testing.course import Recipe
from dpframe.testing.report import Report
from dpframe.testing.verification import verify


def verified(job: Composed) -> dict[str, Any]:
    """Prints the report, and ends with code 1 where a check fails; a sweep goes on."""
    if job.settings.checkpoint is not None:
        raise UserError(
            f"checkpoint={job.settings.checkpoint}: mode=verify starts from the recipe's own "
            "weights; leave it out"
        )
    report = verify(strategy_of(job), recipe=recipe_of(job))
    print(printable(str(report)), flush=True)
    if job.is_run_dir_given:
        _keep(report, job)
    is_alone = OmegaConf.is_missing(HydraConfig.get().job, "num")
    if not report.passed and is_alone:
        sys.exit(1)
    return {"metrics": {}}


def recipe_of(job: Composed) -> Recipe:
    settings, trust = job.settings, trust_of(job)
    return Recipe(
        settings.recipe,
        partial(build, job.config["task"], "task", Task, trust=trust),
        partial(build, job.config["data"], "data", DataModule, trust=trust),
        settings.trainer,
        settings.seed,
    )


def strategy_of(job: Composed, arguments: Mapping[str, Any] | None = None) -> partial[Strategy]:
    """`arguments` are set in the config's node."""
    node = {**job.config["strategy"], **(arguments or {})}
    return partial(build, node, "strategy", Strategy, trust=trust_of(job))


def _keep(report: Report, job: Composed) -> None:
    """A sweep takes a run without a summary for one that failed."""
    directory = Path(Directory(Path(job.run_dir), is_given=True).make(job))
    (directory / "verify.txt").write_text(f"{report}\n", encoding="utf-8")
    if report.passed:
        checks = {finding.check: finding.measured for finding in report.findings}
        summary = {"recipe": job.settings.recipe, "checks": checks}
        (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
