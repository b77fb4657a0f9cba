"""The torchmetrics that a task holds: a state for each pass, and results over all processes."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpframe.data.module import mapped
from dpframe.data.reading import noted
from dpframe.errors import UserError
from dpframe.metrics import is_number
from dpframe.named_metrics import NamedMetrics
from dpframe.strategies.base import Strategy
from dpframe.sums import MetricStates
from dpframe.task import Task

EVALUATED = {"val": "validation_step", "test": "test_step"}
LONGEST = 100  # of a row that becomes numbers, and of the sides of a matrix that becomes a table
log = logging.getLogger("dpframe")
States = dict[str, Any]
"""Of one process: the states of each metric, and the compute groups of each collection."""
BESIDE = ""  # the key of what the strategy keeps beside them
NamedTable = tuple[str, list[str], list[list[Any]]]
"""Its name, its columns and its rows."""


class TaskMetrics:
    """Over all processes: the pass that a task's metrics are in, and its results by their names.

    `Held` are the metrics of this process, which the task's steps update; each pass resets them,
    and its end computes them.

    torchmetrics by itself gathers states where each process calls `compute` of the same metrics.
    Here a process may have updated others than the next one, or none: the main process gets the
    states of all and computes.
    """

    added = MetricStates()  # beside torchmetrics' states: plugins/logical keeps those of shares

    def __init__(self, task: Task, strategy: Strategy) -> None:
        self._task = type(task).__name__
        self._adapter, self._kept = task.adapter, task.adapter.kept_metrics
        named = [part for part in task.children() if isinstance(part, NamedMetrics)]
        self._named_metrics = next(iter(named), None)  # task.metrics
        self._strategy = strategy
        self.tables: list[NamedTable] = []  # results that are still to be logged
        self._held = Held(task, strategy)
        self._metrics, self._collections = self._held.by_name, self._held.collections
        self._earlier: list[States] = []  # of this pass, e.g. from processes before a resume
        self._restored: set[str] = set()
        self._told: set[str] = set()
        if self._metrics:
            self.added = strategy.sums.of_metrics(self._updated, _merge)

    @contextmanager
    def apart(self, *, is_part: bool = False) -> Iterator[None]:
        """Within is a pass of its own, e.g. a validation; then the states of the outer pass are
        restored.

        A pass that `is_part` of the outer one, e.g. one of several data sets, counts there, too.
        """
        if not self._metrics:
            yield
            return
        before = self._held.remembered()
        earlier, restored = self._earlier, self._restored
        with self.added.apart():
            self.reset()
            try:
                yield
                if is_part:
                    earlier = [*earlier, *self.state_dict()]
            finally:
                self._held.put_back(before)
                self._earlier, self._restored = earlier, restored

    def reset(self) -> None:
        if self._metrics:
            self._held.reset()
            self.added.reset()
        self._earlier, self._restored = [], set()

    def results(self, kind: str) -> Callable[[Mapping[str, float]], dict[str, float]]:
        """Computes what was updated in this pass; all processes call it. Then names it, e.g.
        `val/f1`, beside the other numbers of the pass, by their names; matrices become `tables`."""
        if not self._metrics and not self._adapter.ends_passes and not self._named_metrics:
            return lambda means: {}
        computed, results = self._results() if self._metrics else ([], [])
        return partial(self._beside, kind, computed, results)

    @torch.no_grad()
    def _beside(
        self,
        kind: str,
        computed: list[tuple[str, Any]],
        results: list[tuple[str, float | None]],
        means: Mapping[str, float],
    ) -> dict[str, float]:
        if self._named_metrics is not None and kind in EVALUATED:
            by_step = f"{self._task}.{EVALUATED[kind]}"
            self._named_metrics.refuse_unmeasured(by_step, [*means, *(name for name, _ in results)])
        named, more = self._named(kind, results, means) if results else {}, {}
        if self._adapter.ends_passes and "/" not in kind:  # that is one of several data sets
            with self._whole():
                more = self._adapter.end_pass(kind, {**means, **named})
            named = self._named(kind, results, means)  # it may have named them
        for name, value in computed:
            if not isinstance(value, float):
                self._show(f"{kind}/{self._adapter.metric_name(kind, name)}", value)
        return named | more

    @torch.no_grad()
    def _results(self) -> tuple[list[tuple[str, Any]], list[tuple[str, float | None]]]:
        """What this process has computed, and the same in all processes: None is no number."""
        self._warn_of_means_of_calls()
        if not self._is_in_parts():
            computed = self._held.computed(self._here())
        else:
            everywhere, computed = self._everywhere(), []
            if self._strategy.is_main:
                with self._holding(everywhere) as names:
                    computed = self._held.computed(names)
        numbers = [(name, value if isinstance(value, float) else None) for name, value in computed]
        return computed, self._strategy.collectives.broadcast(numbers)

    def _warn_of_means_of_calls(self) -> None:
        """MeanMetric counts a mean that it is called with once, of however many rows it is."""
        if self._strategy.replicas == 1 or not self._strategy.is_main:
            return
        for name, metric in self._metrics.items():
            is_mean = type(metric).__name__ == "MeanMetric" and self._held.is_updated(name)
            is_news = is_mean and name not in self._told
            if is_news and metric.weight.item() == metric.update_count:
                self._told.add(name)
                log.warning(
                    "%s weights each call equally, not each row: if shares are uneven, its mean "
                    "differs from that on one replica; call it with weight=len(x)",
                    name,
                )

    def _named(
        self,
        kind: str,
        results: Iterable[tuple[str, float | None]],
        means: Mapping[str, float],
    ) -> dict[str, float]:
        """The numbers. A matrix needs a name of its own, too."""
        named: dict[str, float | None] = {}
        for metric, value in results:
            name = f"{kind}/{self._adapter.metric_name(kind, metric)}"
            if self._adapter.prefers_metrics:
                if name in means and not self._adapter.logs_metric(kind, metric):
                    continue  # e.g. a metric `loss` that computes the loss
            elif name in means or name in named:
                other = "of another one" if name in named else "in what its step returns"
                raise UserError(
                    f"{name} is the result of a metric of {self._task}, and {other}; rename one of "
                    "them, e.g. by MetricCollection(..., prefix='top5_')"
                )
            named[name] = value
        return {name: value for name, value in named.items() if value is not None}

    def _is_in_parts(self) -> bool:
        return bool(self._strategy.world_size > 1 or self._earlier or self.added.is_used)

    def state_dict(self) -> list[States]:
        """The states of this process, on the CPU."""
        return [_copied(self._here(), "cpu"), *self._earlier] if self._metrics else []

    def load_state_dict(self, states: list[list[States]], *, rank: int, world_size: int) -> None:
        """From those of all processes. If there were more or fewer of them, the main process takes
        all into account."""
        if len(states) != world_size:
            self._earlier = list(chain.from_iterable(states)) if rank == 0 else []
        elif states[rank]:
            here, *self._earlier = states[rank]
            for name in self._metrics.keys() & here.keys():
                _restore(self._metrics[name], name, here[name])
                self._restored.add(name)
            if BESIDE in here:
                self.added.load_state_dict(here[BESIDE])

    def _here(self) -> States:
        """The states of the metrics that were updated in this pass."""
        states: States = {
            name: metric.metric_state
            for name, metric in self._metrics.items()
            if name not in self._kept and (name in self._restored or self._held.is_updated(name))
        }
        updated = [name for name in states if self._held.is_updated(name)]
        for name, collection in self._collections.items():
            if any(metric.startswith(f"{name}.") for metric in updated):  # it has formed its groups
                states[name] = sorted(map(sorted, collection.compute_groups.values()))
        if added := self.added.state_dict():
            states[BESIDE] = added
        return states

    def _updated(self) -> Iterator[tuple[str, Any]]:
        """The metrics that were updated in this pass, by their names."""
        for name, metric in self._metrics.items():
            if name not in self._kept and self._held.is_updated(name):
                yield name, metric

    def _everywhere(self) -> list[States]:
        """The states of all processes, on the main one."""
        return list(chain.from_iterable(self._strategy.collectives.gather(self.state_dict())))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within, each process's metrics have the states of all processes."""
        everywhere: list[States] = []
        if self._metrics and self._is_in_parts():
            everywhere = self._strategy.collectives.broadcast(self._everywhere())
        with self._holding(everywhere):
            yield

    @contextmanager
    def _holding(self, everywhere: list[States]) -> Iterator[list[str]]:
        """Within, the metrics have all these states; yields the names of those that have some."""
        before = self._held.remembered()
        try:
            yield self._merge_all(everywhere)
        finally:
            self._held.put_back(before)

    def _merge_all(self, everywhere: list[States]) -> list[str]:
        """Gives the metrics all these states; the names of those that have some."""
        names = dict.fromkeys(chain.from_iterable(everywhere))
        for name in names:
            several = [states[name] for states in everywhere if name in states]
            if name == BESIDE:
                continue
            if name in self._metrics:
                beside = [states.get(BESIDE, {}) for states in everywhere if name in states]
                _merge(self._metrics[name], self.added.joined(name, several, beside))
            elif any(groups != several[0] for groups in several):
                raise UserError(
                    f"{self._task}.{name} shares states between different metrics on different "
                    "processes; use MetricCollection(..., compute_groups=False)"
                )
        return list(names)

    def _show(self, name: str, value: Any) -> None:
        is_matrix = isinstance(value, Tensor) and value.ndim == 2
        if is_matrix and max(value.shape) <= LONGEST:
            columns = ["row", *map(str, range(value.shape[1]))]
            rows = [[row, *cells] for row, cells in enumerate(value.tolist())]
            self.tables.append((name, columns, rows))
        elif name not in self._told:
            self._told.add(name)
            has_shape = isinstance(value, Tensor)
            what = f"of shape {tuple(value.shape)}" if has_shape else f"a {type(value).__name__}"
            log.warning("%s is not logged: the metric's result is %s, and no number", name, what)


class Held:
    """The metrics in a task's modules, by their names, as this process has them."""

    def __init__(self, task: Task, strategy: Strategy) -> None:
        self.by_name: dict[str, Any] = {}
        self.collections: dict[str, Any] = {}
        self._task = type(task).__name__
        self._kept = task.adapter.kept_metrics
        self._outermost: dict[str, Any] = {}
        self._within: dict[str, set[str]] = {}  # by outermost one, the metrics that it is made of
        self._fresh: dict[str, States] = {}  # of those whose forward counts no update
        self._parts: dict[str, list[str]] = {}  # the metrics that a composition or wrapper holds
        self._beside: dict[str, dict[str, Tensor]] = {}  # what a wrapper keeps beside its states
        if torchmetrics := sys.modules.get("torchmetrics"):  # who holds one has imported it
            self._find(task, strategy, torchmetrics)
        for name, metric in self.by_name.items():
            held = {id(part) for part in metric.modules() if part is not metric}
            self._parts[name] = [n for n, part in self.by_name.items() if id(part) in held]
            self._beside[name] = _tensors_beside(metric) if held else {}
        if strategy.sharding.cuts:  # it moves parameters and buffers, and states are neither
            for metric in self.by_name.values():
                metric.to(strategy.device)
        if self.by_name and strategy.replicates_task:
            name, metric = next(iter(self.by_name.items()))
            raise UserError(
                f"{self._task}.{name} is a {type(metric).__name__} of torchmetrics, and "
                f"{strategy.name} runs steps on copies of the task, whose updates are lost; "
                "use strategy=ddp, or trainer.gpus=1"
            )

    def _find(self, task: Task, strategy: Strategy, torchmetrics: Any) -> None:
        for name, module in task.named_modules():
            if isinstance(module, torchmetrics.ClasswiseWrapper):
                pass  # has the states of what it holds, and always says that it was updated
            elif isinstance(module, torchmetrics.Metric):
                self.by_name[name] = module
                module.distributed_available_fn = _never  # so that it waits for no other process
                module.compute_with_cache = False  # what a step computes is of its process alone
                if isinstance(module, torchmetrics.wrappers.Running):
                    self._refuse_window(name, module, strategy)
                    self._fresh[name] = {}
                if module.dtype.itemsize < 4:  # with the weights, e.g. by trainer.precision=16-true
                    module.to(torch.float32)  # a sum in 16 bits soon stays the same
            elif isinstance(module, torchmetrics.MetricCollection):
                self.collections[name] = module
            else:
                continue
            owner = next((one for one in self._outermost if name.startswith(f"{one}.")), name)
            self._outermost.setdefault(owner, module)
            self._within.setdefault(owner, set()).add(name)

    def _refuse_window(self, name: str, metric: Any, strategy: Strategy) -> None:
        """It counts updates, which are one a share: as many a step as there are replicas."""
        if strategy.replicas > 1 or strategy.has_fixed_shares:
            raise UserError(
                f"{self._task}.{name} is a {type(metric).__name__} of torchmetrics, whose window "
                "counts updates, so that its value depends on the number of replicas; use a "
                "metric over the whole epoch, e.g. MeanMetric, or one replica"
            )

    def reset(self) -> None:
        """Begins a pass, but for those that the task's adapter resets."""
        for name, metric in self.by_name.items():
            if name in self._kept:
                continue
            metric.reset()
            self._forget(name)
            if name in self._fresh:
                self._fresh[name] = _copied(metric.metric_state, metric.device)

    def _forget(self, name: str) -> None:
        """What torchmetrics' own reset leaves, e.g. the extremes of a MinMaxMetric, and what it has
        of batches, which are other ones on another number of replicas."""
        for key, value in self._beside[name].items():
            setattr(self.by_name[name], key, value.clone())

    def is_updated(self, name: str) -> bool:
        metric, fresh = self.by_name[name], self._fresh.get(name)
        if (parts := self._parts[name]) and not metric.metric_state:
            return all(map(self.is_updated, parts))  # a composition's reset keeps its own count
        return metric.update_called or bool(fresh and not _is_same(metric.metric_state, fresh))

    def computed(self, updated: Iterable[str]) -> list[tuple[str, Any]]:
        """Each result by its name: a float where it is a number."""
        names, results = set(updated), list[tuple[str, Any]]()
        for name in self._beside.keys() - self._kept:
            self._forget(name)
        with warnings.catch_warnings():  # of metrics that only other processes have updated
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            for name, module in self._outermost.items():
                if names & self._within[name]:
                    value = self._value_of(name, module)
                    results += _flat("" if name in self.collections else name, value)
        return results

    def _value_of(self, name: str, module: Any) -> Any:
        with noted(lambda: f"while computing the metric {name} of {self._task}"):
            return module.compute()

    def remembered(self) -> dict[str, dict[str, Any]]:
        """All attributes of each metric, which makes new ones at a reset, and empties its lists."""
        return {
            name: {key: v[:] if isinstance(v, list) else v for key, v in vars(metric).items()}
            for name, metric in self.by_name.items()
        }

    def put_back(self, remembered: dict[str, dict[str, Any]]) -> None:
        for name, attributes in remembered.items():
            if name not in self._kept:
                vars(self.by_name[name]).update(attributes)


def _never() -> bool:
    return False


def _tensors_beside(metric: Any) -> dict[str, Tensor]:
    """The tensors among its attributes that are no states of it."""
    own = {key: value for key, value in vars(metric).items() if isinstance(value, Tensor)}
    return {key: value.clone() for key, value in own.items() if key not in metric.metric_state}


def _merge(metric: Any, everywhere: list[dict[str, Any]]) -> None:
    """Gives the metric the states that torchmetrics makes of those of several processes."""
    gathered: dict[int, list[Any]] = {}
    for name, state in metric.metric_state.items():
        values = [states[name] for states in everywhere]
        if isinstance(state, list):
            values = list(chain.from_iterable(values))
        if values:
            # torchmetrics asks for what the processes have of each tensor: this one stands for it.
            tensor = torch.empty(0)
            gathered[id(tensor)] = _copied(values, metric.device)
            setattr(metric, name, [tensor] if isinstance(state, list) else tensor)

    def gather(tensor: Tensor, group: Any = None) -> list[Any]:
        return gathered.get(id(tensor), [tensor])

    metric.sync(dist_sync_fn=gather, distributed_available=lambda: True)
    merged = metric.metric_state
    metric.unsync()
    for name, state in merged.items():
        setattr(metric, name, state)


def _restore(metric: Any, name: str, states: dict[str, Any]) -> None:
    now = metric.metric_state
    kinds = {key: list if isinstance(state, list) else Tensor for key, state in now.items()}
    if states.keys() != kinds.keys() or not all(isinstance(states[k], kinds[k]) for k in kinds):
        raise ValueError(f"the states of {name} are {str(states)[:200]}")
    for key, state in _copied(states, metric.device).items():
        setattr(metric, key, state)


def _copied(value: Any, device: torch.device | str) -> Any:
    """The next update may write over what it is given."""
    return mapped(
        lambda leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf,
        value,
    )


def _is_same(states: States, others: States) -> bool:
    """Of tensors, or lists of them; NaN is NaN."""
    return all(
        len(states[name]) == len(other)
        if isinstance(other, list)
        else torch.equal(states[name].nan_to_num(), other.nan_to_num())
        for name, other in others.items()
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`f1`, `f1/key` of a dict, `f1_0` of a row; what is not numbers, as it is."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}/{key}" if name else str(key), part)
    elif is_number(value):
        yield name, float(value)
    elif isinstance(value, Tensor) and value.ndim == 1 and len(value) <= LONGEST:
        yield from ((f"{name}_{index}", number) for index, number in enumerate(value.tolist()))
    else:
        yield name, value
