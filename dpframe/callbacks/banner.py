"""What a run prints before it trains, and its tables of numbers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dpframe.data import split
from dpframe.loggers.formats import ruled

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


def banner(trainer: "Trainer") -> str:
    strategy, run = trainer.strategy, trainer.run
    shares = trainer.settings.logical_replicas
    dashboards = (logger.dashboard(run.directory) for logger in trainer.loggers)
    task = f"{type(trainer.task).__name__}, seed {trainer.seed}"
    rows = [
        ("recipe", f"{run.recipe}  ({task})") if run.recipe else ("task", task),
        ("strategy", f"{strategy.name} on {_devices(strategy.devices)}{_nodes(trainer)}"),
        ("step", _step(trainer)),
        ("data", _data(trainer)),
        ("precision", _precision(trainer)),
        ("bits", shares and f"the same on 1 to {shares} replicas: {shares} shares of each batch"),
        ("layers", trainer.training.own),
        ("layout", trainer.layout),
        ("run", run.directory),
        *(("dashboard", command) for command in dashboards),
    ]
    facts = "\n".join(f"{name:<10} {value}" for name, value in rows if value)
    return f"{facts}\n\n{parameters(trainer)}\n"


def batch(rows: int, replicas: int) -> str:
    """A global batch as the replicas share it, e.g. `batch 128 = 4 replicas x 32`."""
    shares = [len(share) for share in split(range(rows), replicas)]
    if len(set(shares)) == 1:
        return f"batch {rows} = {replicas} replica{'s' if replicas > 1 else ''} x {shares[0]}"
    return f"batch {rows} = {' + '.join(map(str, shares))}"


def parameters(trainer: "Trainer") -> str:
    """The layers that own parameters, with their shapes and counts."""
    rows: list[tuple[str, ...]] = []
    counted: set[int] = set()
    total = 0
    for name, module in trainer.task.named_modules():
        direct = [p for p in module.parameters(recurse=False) if id(p) not in counted]
        counted |= {id(p) for p in direct}
        count = sum(p.numel() for p in direct)
        total += count
        if direct:
            shapes = " ".join("x".join(map(str, p.shape)) or "1" for p in direct)
            rows.append((name or "(task)", type(module).__name__, shapes, f"{count:,}"))
    head = ("layer", "kind", "shapes", "parameters")
    return ruled([head, *rows, ("total", "", "", f"{total:,}")])


def table(metrics: dict[str, float]) -> str:
    return side_by_side({"value": metrics})


def side_by_side(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Metrics of several epochs, each with its head."""
    each = columns.values()
    rows = [
        (name, *(f"{metrics[name]:.6g}" if name in metrics else "" for metrics in each))
        for name in sorted(set().union(*each))
    ]
    return ruled([("metric", *columns), *rows])


def _step(trainer: "Trainer") -> str:
    batches = trainer.settings.accumulate
    size, strategy = trainer.feed.source.batch_size, trainer.strategy
    text = batch(size, strategy.replicas) if size else "a ready batch"
    if not size and strategy.world_size > 1:
        text += f" of each of {strategy.world_size} ranks"
    elif not size and strategy.replicas > 1:
        text += f", cut for {strategy.replicas} replicas"
    return text + (f", {batches} batches a step" if batches > 1 else "")


def _precision(trainer: "Trainer") -> str:
    strategy, precision = trainer.strategy, trainer.settings.precision
    if strategy.replicas == 1 or strategy.has_fixed_shares or precision == "64":
        return precision
    return f"{precision}: one replica's curve but for rounding; trainer.logical_replicas: its bits"


def _data(trainer: "Trainer") -> str:
    """How the data is read, and whether it is on the GPU or copied there batch by batch."""
    loader = trainer.feed.train
    if loader.device.type != "cpu":
        return f"{len(trainer.feed.source.dataset):,} rows on {loader.device}"
    on_gpu = trainer.strategy.device.type != "cpu"
    return f"{loader.how}, copied by the batch" if on_gpu else loader.how


def _devices(names: Sequence[str]) -> str:
    is_alike = len(set(names)) == 1 < len(names)
    return f"{len(names)} x {names[0]}" if is_alike else ", ".join(names)


def _nodes(trainer: "Trainer") -> str:
    nodes, replicas = trainer.strategy.nodes, trainer.strategy.replicas
    return f": {replicas} replicas = {nodes} nodes x {replicas // nodes}" if nodes > 1 else ""
