"""A recipe on other strategies and numbers of replicas: what this machine can have, trained."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import NamedTuple

from dpframe import UserError
from dpframe.config.build import check_targets
from dpframe.config.loader import ConfigLoader
from dpframe.config.overrides import key_of
from dpframe.modes.measure import devices_of
from dpframe.plugin import (
    REHEARSED_REPLICAS,
    Composed,
    RankFailed,
    composed,
    first_line,
    not_one_of,
    signals,
    strategy_of,
)
from dpframe.plugins.lab.contest import Entry, train
from dpframe.strategies.devices import present

AUTO = "auto"  # is one of the others
ALONE = ("cpu", "single_gpu")  # have one replica


class Variant(NamedTuple):
    """A strategy of so many replicas; `failure` is why it can't run here."""

    name: str
    replicas: int
    job: Composed | None
    devices: Sequence[str] = ()
    launches_ranks: bool = False
    failure: str = ""


def train_all(variants: Sequence[Variant]) -> list[Entry]:
    """Trains each variant. Those with ranks come first: after a training in this process, ranks
    can't be forked."""
    entries: dict[int, Entry] = {}
    order = sorted(range(len(variants)), key=lambda at: not variants[at].launches_ranks)
    for at in order:
        signals.raise_if_signaled()
        variant = variants[at]
        print(f"{variant.name}, {variant.replicas} …", flush=True)
        entries[at] = _entry(variant)
    return [entries[at] for at in range(len(variants))]


def list_variants(
    job: Composed, names: Sequence[str] | None = None, counts: Sequence[int] | None = None
) -> list[Variant]:
    """The variants asked for, or all that fit this machine, by powers of two."""
    for name in names or ():
        if name not in list_strategies(job):
            raise not_one_of("compare.strategies", name, list_strategies(job))
    found: list[Variant] = []
    is_told = bool(counts or job.settings.trainer.gpus)
    for name in names or _names(job):
        is_alone = name in ALONE
        for count in [1] if is_alone else counts or _counts(job):
            variant = with_strategy(job, name, None if is_alone and not is_told else count)
            if not variant.failure or names:
                found.append(variant)
    if found and not counts and all(variant.replicas > 1 for variant in found):
        found.insert(0, with_strategy(job, found[0].name, 1))  # what the others have to equal
    if not found:
        raise UserError("mode=compare: no strategy fits; set compare.strategies and compare.gpus")
    return found


def list_strategies(job: Composed) -> list[str]:
    """All that there are, but the one that stands for others."""
    return [name for name in ConfigLoader(_folder(job)).options("strategy") if name != AUTO]


def with_strategy(job: Composed, name: str, gpus: int | None = None) -> Variant:
    """The job with another strategy, on `gpus` devices or as many as the job says."""
    kept = [each for each in job.overrides if not _is_of_strategy(each)]
    if gpus is not None:
        kept = [each for each in kept if key_of(each) != "trainer.gpus"]
        kept.append(f"trainer.gpus={gpus}")
    try:
        other = composed([*kept, f"strategy={name}"], config_dir=_folder(job))
        check_targets(other)
        strategy = strategy_of(other)()
        with redirect_stderr(io.StringIO()):  # that it would be a rehearsal
            devices = devices_of(strategy)
    except (UserError, ImportError) as error:
        return Variant(name, gpus or 1, None, failure=first_line(error))
    return Variant(name, len(devices), other, devices, strategy.launches_ranks)


def _names(job: Composed) -> list[str]:
    """The strategies to try; single_gpu only where there is a GPU."""
    has_gpus = job.settings.trainer.accelerator != "cpu" and bool(present("auto"))
    return [name for name in list_strategies(job) if has_gpus or name != "single_gpu"]


def _counts(job: Composed) -> list[int]:
    """2, 4 and so on and all, of the GPUs; where there are none, a rehearsal."""
    accelerator = job.settings.trainer.accelerator
    most = len(present("auto")) if accelerator != "cpu" else 0
    counts = [REHEARSED_REPLICAS]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return sorted({*counts, most} - {0, 1})


def _entry(variant: Variant) -> Entry:
    name, job = variant.name, variant.job
    if job is None:
        return Entry(name, variant.replicas, failure=variant.failure)
    try:
        return strategy_of(job)().launch(train, job, name)
    except RankFailed as error:
        return Entry(name, variant.replicas, failure=error.reason)
    except UserError as error:
        return Entry(name, variant.replicas, failure=first_line(error))


def _is_of_strategy(override: str) -> bool:
    key = key_of(override)
    return key == "strategy" or key.startswith("strategy.")


def _folder(job: Composed) -> str | None:
    return None if job.config_dir is None else str(job.config_dir)
