"""What the nodes of a job agree on before their ranks start: the config, and where it goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe import __version__, checkpoint, files
from dpframe.cli.compose import Composed, composed
from dpframe.cli.resume import key_of
from dpframe.cli.settings import EVALUATIONS
from dpframe.errors import UserError
from dpframe.launch import environment
from dpframe.launch.local import RankFailed
from dpframe.launch.rank import ALIKE
from dpframe.strategies import Strategy

if TYPE_CHECKING:
    from dpframe.strategies.nodes import Meeting

OF_ONE_NODE = (
    "trainer.gpus",
    "trainer.threads",
    "trainer.rendezvous",
    "strategy.gpus",
    "resume",
    "checkpoint",
)


@contextmanager
def meet(job: Composed) -> Iterator[tuple[Composed, "Meeting | None"]]:
    """The job that all its nodes share, and where they meet, until its ranks have ended."""
    settings = job.settings.trainer
    if settings.nodes == 1:
        yield job, None
        return
    from dpframe.strategies.nodes import Meeting  # imports torch.distributed: only when used

    seconds = float(job.config["strategy"].get("timeout_seconds", 1800.0))
    meeting = Meeting(settings.nodes, str(settings.rendezvous), timeout_seconds=seconds)
    try:
        yield _agreed(job, meeting), meeting
    except BaseException as error:
        meeting.leave(error)
        if meeting.index > 0 and isinstance(error, UserError | RankFailed):
            error.told = {}  # the main node writes down how the run has ended
        raise
    finally:
        meeting.leave()


def refuse_several(job: Composed, why: str) -> None:
    if job.settings.trainer.nodes > 1:
        raise UserError(f"trainer.nodes={job.settings.trainer.nodes} but {why}; leave it out")


def start_of(job: Composed, strategy: Strategy) -> dict[str, Any] | None:
    """The checkpoint that a rank begins with: the main node's, where not all have it."""
    if not job.is_start_sent:
        is_weights_alone = job.settings.mode in EVALUATIONS
        whole = not (strategy.reads_parts or is_weights_alone)
        return checkpoint.load(job.start, whole=whole) if job.start is not None else None
    is_main = strategy.is_main and job.start is not None
    return strategy.collectives.broadcast(checkpoint.load(job.start) if is_main else None)  # type: ignore[arg-type]


def refuse(strategy: Strategy, job: Composed) -> None:
    if job.settings.trainer.nodes == 1:
        return
    if environment.is_rank():
        refuse_several(
            job, f"{environment.find_launcher()} has started this rank, and knows its nodes"
        )
    if not strategy.spans_nodes:
        raise UserError(
            f"trainer.nodes={job.settings.trainer.nodes} but {strategy.name} runs on one machine; "
            "use strategy=ddp, or leave trainer.nodes out"
        )
    if job.number is not None:
        refuse_several(job, "the runs of a sweep are each on one machine")


def _agreed(job: Composed, meeting: "Meeting") -> Composed:
    facts = meeting.join(_facts(job), first=lambda facts: facts["start"] is None)
    main = facts[0]
    for name, theirs in zip(meeting.names, facts, strict=True):
        _refuse_other(main, meeting.names[0], theirs, name)
    if main["start"] is None and job.lacks is not None:
        raise job.lacks
    if main["start"] is None:
        return job
    if job.lacks is not None:
        job = _recomposed(job, main["overrides"])
    are_same = all(theirs["start"] == main["start"] for theirs in facts)
    settings = replace(job.settings, resume=main["resume"], checkpoint=main["checkpoint"])
    return replace(
        job,
        settings=settings,
        start=job.start if are_same or meeting.index == 0 else Path(main["path"]),
        is_start_sent=not are_same,
    )


def _facts(job: Composed) -> dict[str, Any]:
    """JSON of what has to be equal on all nodes, and what the main one tells the others."""
    return {
        "version": __version__,
        "config": None if job.lacks is not None else _leaves(job.public),
        "begins": bool(job.lacks or job.typed_start),
        "start": None if job.start is None else files.identity(job.start),
        "path": str(job.start),
        "overrides": job.overrides,
        "resume": job.settings.resume,
        "checkpoint": job.settings.checkpoint,
    }


def _refuse_other(main: dict[str, Any], mains: str, theirs: dict[str, Any], name: str) -> None:
    there = f"on {name}, and %s on {mains}; {ALIKE}"
    if theirs["version"] != main["version"]:
        line = f"dpframe is {theirs['version']} {there}"
        raise UserError((line % main["version"]).replace(ALIKE, "install the same one"))
    if theirs["begins"] != main["begins"]:
        words = {True: "typed", False: "not typed"}
        line = f"resume= or checkpoint= is {words[theirs['begins']]} {there}"
        raise UserError(line % words[main["begins"]])
    if theirs["config"] is None or main["config"] is None:
        return  # it takes the main one's
    for key in [*main["config"], *theirs["config"]]:
        values = [facts["config"].get(key, "not there") for facts in (theirs, main)]
        if values[0] != values[1] and not key.startswith(OF_ONE_NODE):
            raise UserError(f"{key} is {values[0]} {there}" % values[1])


def _leaves(node: Any, where: str = "") -> dict[str, str]:
    if isinstance(node, Mapping) and node:
        pairs = [_leaves(part, f"{where}.{key}".lstrip(".")) for key, part in node.items()]
        return {key: value for each in pairs for key, value in each.items()}
    return {where: str(node)}


def _recomposed(job: Composed, overrides: list[str]) -> Composed:
    """Composes the job with the overrides of a run that only the main node has."""
    others = [each for each in overrides if key_of(each) not in ("resume", "checkpoint")]
    folder = str(job.config_dir) if job.config_dir is not None else None
    return composed(others, config_dir=folder)
