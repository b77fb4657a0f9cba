"""A sweep: Hydra's sweeper names the points, each is checked first, then each is a run."""

import sys
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpframe.cli.compose import CONFIG_NAME, from_hydra, hydra_over, raw, search_path
from dpframe.errors import UserError


def sweep(overrides: list[str], config_dir: str | None) -> int:
    """0, or the highest exit code of its runs: one that fails leaves the others running."""
    with hydra_over(config_dir) as hydra:
        points = _points(overrides, hydra)
        for point in points:
            raw(point, config_dir=config_dir)
        codes: dict[str, int] = {}

        def job(config: DictConfig) -> float | None:
            return _run_point(config, codes)

        hydra.multirun(CONFIG_NAME, job, [*search_path(config_dir), *overrides])
    failed = {name: code for name, code in codes.items() if code}
    print(f"sweep: {len(codes) - len(failed)} of {len(codes)} runs finished", flush=True)
    for name, code in failed.items():
        print(f"sweep: failed with {code}: {name}", file=sys.stderr)
    return max(codes.values(), default=0)


def _points(overrides: list[str], hydra: Any) -> list[list[str]]:
    """The override lists of a sweep over listed values; another sweeper draws its own."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if any(override.startswith("hydra/sweeper=") for override in overrides):
        return []
    parsed = OverridesParser.create(hydra.config_loader).parse_overrides(overrides)
    return [point for batch in BasicSweeper.split_arguments(parsed, None) for point in batch]


def _run_point(config: DictConfig, codes: dict[str, int]) -> float | None:
    """One run, in the directory that Hydra made for it; its validation loss, to optimise."""
    name = ",".join(HydraConfig.get().overrides.task)
    codes[name] = 1
    with_hydra: Any = HydraConfig.instance().cfg
    try:
        job = from_hydra(DictConfig({**config, "hydra": with_hydra.hydra}))
        job.run_dir, job.is_run_dir_given = HydraConfig.get().runtime.output_dir, True
        from dpframe.cli.run import run

        summary = run(job)
    except UserError as error:
        codes[name] = 2
        print(f"dpframe: {error}", file=sys.stderr)
        return None
    except Exception as error:
        from dpframe.cli.main import show_failure

        show_failure(error)
        return None
    codes[name] = 0
    return summary["metrics"].get("val/loss")
