"""`check_strategy`: the conformance kit for a plugin's own tests."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from dpframe.cli.compose import composed
from dpframe.cli.verify import recipe_of, strategy_of
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.testing.course import Recipe
from dpframe.testing.report import Report
from dpframe.testing.verification import GIVE_UP_SECONDS, verify


def check_strategy(
    strategy: Callable[..., Strategy] | str,
    *,
    recipe: Recipe | str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    give_up_seconds: float = GIVE_UP_SECONDS,
    **arguments: Any,
) -> Report:
    """Raises an AssertionError, with a table and the causes, where the strategy is not exact.

    `strategy` is a class, or a function that makes one, called with `arguments`; or the name of a
    config, as in `check_strategy("ddp", recipe="boston", gpus=2)`. A `recipe` is checked beside
    the kit's own networks: a name with `overrides`, or a Recipe. `only` and `skip` name checks.

    What is given has to be importable by its name: not a lambda, and no class of a function.
    """
    job = None
    if isinstance(recipe, str):
        named = [f"strategy={strategy}"] if isinstance(strategy, str) else []
        job = composed([f"recipe={recipe}", *named, *overrides], config_dir=config_dir)
        recipe = recipe_of(job)
    elif overrides or config_dir:
        raise UserError("overrides and config_dir are of a recipe's config; give recipe=NAME")
    make: Callable[[], Strategy]
    if not isinstance(strategy, str):
        make = partial(strategy, **arguments)
    elif job is not None:
        make = strategy_of(job, arguments)
    else:
        raise UserError(f"strategy={strategy} is looked up in a recipe's config; give recipe=NAME")
    report = verify(make, recipe=recipe, only=only, skip=skip, give_up_seconds=give_up_seconds)
    if not report.passed:
        raise AssertionError(f"\n{report}")
    return report
