"""Exact means: weighted sums of what the steps returned, reduced over the replicas once."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import compress, islice
from operator import add, mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpframe.devices.accelerator import has_float64
from dpframe.errors import UserError
from dpframe.sums import FLOATS, Sums

Totals = dict[str, tuple[Any, Any]]
"""By name: the weighted values' sum, and the weights', each as `Sums` has it."""
Kept = tuple[dict[str, Any], Any]
"""An output, and its weight."""
Columns = dict[str, tuple[list[float], list[float]]]
"""By name: values and their weights, in order."""
MOST_KEPT = 20_000  # numbers of outputs, until they are read and added up: some MB
FEW_KEPT = 1_000  # numbers of one of several sets that are read together
MOST_BITS = 1024  # whole numbers of more are no float
NAME = re.compile(r"[\w.+=@-]+(/[\w.+=@-]+)+")  # e.g. val/extra, val/clean/f1
PART = "\0"  # between the names of a loss and of a part of it
SOMETIMES_IN_PARTS = (
    "a step returned losses by name for some batches and one loss for others; return {...} always, "
    "in which a loss that no row has may be left out"
)
SOMETIMES_WEIGHTED = (
    "a step returned a 'weight' for some batches and none for others; return one always, or never"
)


class Weighed(dict[str, Any]):
    """An output of which some numbers have a weight of their own, instead of the rows: they are
    parts of its `loss`, which is their sum."""

    def __init__(self, numbers: Any, weights: dict[str, Any], loss: str = "loss") -> None:
        super().__init__(numbers)
        self.weights = weights
        self.loss = loss

    def in_parts(self) -> "Weighed":
        """Without the loss, the mean of which is the sum of the parts' means."""
        parts = {name: f"{self.loss}{PART}{name}" for name in self.weights}
        numbers = {parts.get(name, name): value for name, value in self.items()}
        del numbers[self.loss]
        return Weighed(numbers, {parts[name]: weight for name, weight in self.weights.items()})


def weight_of(name: str, output: dict[str, Any], rows: int) -> Any:
    own = output.weights if isinstance(output, Weighed) else {}
    return own.get(name, output.get("weight", rows))


class Means:
    """Collects without waiting for the GPU; `window` and `total` read, and wait.

    `reduce` sums a tensor over the processes, or is None if there is one; `agree` turns each
    process's names into one list. Each process adds its numbers one after the other, and the
    processes are summed only where a mean is read: no sum depends on when it was read or saved.
    """

    def __init__(
        self,
        reduce: Callable[[Tensor], Tensor] | None,
        agree: Callable[[list[str]], list[str]],
        sums: Sums = FLOATS,
    ) -> None:
        self._reduce = reduce
        self._agree = agree
        self._sums = sums
        self.weights: dict[str, float] = {}  # by which the newest window's means were divided
        self._names: list[str] = []
        self._outputs = 0  # since the last reset
        self._times: Counter[str] = Counter()  # how many of them have the name
        self._kept: list[Kept] = []
        self._window: Totals = {}
        self._totals: Totals = {}
        self._reduced: Totals | None = None  # the totals over all processes, until more is added

    def add(self, measured: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """One (rows, output) a replica; an output with a `weight` counts that instead of rows.

        Every process calls it equally often, e.g. with nothing if it had no row of a batch."""
        self._reduced = None
        for rows, output in measured:
            if isinstance(output, Weighed):
                output = output.in_parts()
            self._kept.append((output, output.get("weight", rows)))
            if len(self._kept) * len(output) > MOST_KEPT:
                self._collect()

    def reset(self) -> None:
        self._kept.clear()
        self._window.clear()
        self._totals.clear()
        self._outputs = 0
        self._times.clear()
        self._reduced = None

    def window(self) -> dict[str, float]:
        """The means since the last window, over all replicas."""
        self._collect()
        (sums,) = self._everywhere([self], [self._window])
        self.weights = {name: weight for name, (_, weight) in sums.items()}
        self._window.clear()
        return _divided(sums)

    def total(self, *others: "Means") -> dict[str, float]:
        """The means since the last reset, over all replicas; `others` are read with it, and share
        its all-reduce."""
        _collect_all([self, *others])
        changed = [means for means in (self, *others) if means._reduced is None]
        everywhere = self._everywhere(changed, [means._totals for means in changed], is_whole=True)
        for means, sums in zip(changed, everywhere, strict=True):
            means._reduced = sums
        return self.known()

    def known(self) -> dict[str, float]:
        """The means as `total` of this one, or of one that was given it, left them."""
        return _divided(self._reduced or {})

    def collect_many(self) -> None:
        """Adds up what is kept if it is much: where several are kept until `total`."""
        if sum(len(output) for output, _ in self._kept) > FEW_KEPT:
            self._collect()

    def state_dict(self) -> dict[str, dict[str, list[Any]]]:
        """This process's sums."""
        self._collect()
        parts = {"window": self._window, "totals": self._totals}
        return {
            part: {name: list(map(self._sums.saved, pair)) for name, pair in parts[part].items()}
            for part in parts
        }

    def load_state_dict(
        self, states: list[dict[str, Any]], *, rank: int = 0, world_size: int = 1
    ) -> None:
        """From the states of all processes. If there were more or fewer of them, the main process
        takes the sums of all."""
        counts = len(states) == world_size or rank == 0
        if len(states) == world_size:
            states = [states[rank]]
        self._window, self._totals = (
            _joined([_read(state[part], self._sums) for state in states], counts, self._sums.zero)
            for part in ("window", "totals")
        )
        self._reduced = None

    def _collect(self) -> None:
        if not self._kept:
            return
        table = _alike(self._kept)
        if table is not None:
            self._take(_counted(*table), self._kept[0][0])
        else:
            self._take(_columns(self._kept))

    def _take(self, columns: Columns, names: Iterable[str] | None = None) -> None:
        """Adds up what is kept, as read. `names`: those of each output."""
        self._outputs += len(self._kept)
        if names is not None:
            self._times.update(dict.fromkeys(names, len(self._kept)))
        else:
            for output, _ in self._kept:
                own = output.keys()
                self._times.update(own - output.weights if isinstance(output, Weighed) else own)
        self._kept.clear()
        nothing = self._sums.zero, self._sums.zero
        for name, (values, weights) in columns.items():
            # One after the other: from Python 3.12 on `sum` compensates for rounding, so its
            # result would depend on where a column ends.
            products = [*map(mul, values, weights)]
            for sums in (self._window, self._totals):
                total, whole = sums.get(name, nothing)
                sums[name] = reduce(add, products, total), reduce(add, weights, whole)

    def _everywhere(
        self, several: list["Means"], local: list[Totals], *, is_whole: bool = False
    ) -> list[Totals]:
        """Over all processes, which all call it, as `add` is called alike: by one all-reduce, and
        one more if there are new names. `is_whole`: a name that only some measure is refused.

        A vector has, for each Means, how many of its names are not agreed on; then the numbers of
        those that are, in the order of `_names`. If any process has new names, all agree again."""
        if self._reduce is None or not several:
            return [{n: (float(a), float(b)) for n, (a, b) in sorted(s.items())} for s in local]
        both = list(zip(several, local, strict=True))
        while True:
            vector = [float(len(sums.keys() - set(one._names))) for one, sums in both]
            for one, sums in both:
                vector += one._vector(sums, is_whole)
            reduced = iter(self._reduce(torch.tensor(vector, dtype=torch.float64)).tolist())
            new = [next(reduced) for _ in both]
            if not any(new):
                return [one._sums_in(reduced, is_whole) for one in several]
            for count, (one, sums) in zip(new, both, strict=True):
                if count:
                    one._names = self._agree(sorted({*one._names, *sums}))

    def _vector(self, sums: Totals, is_whole: bool) -> Iterator[float]:
        """This process's numbers of each name that all have agreed on."""
        nothing = self._sums.zero, self._sums.zero
        for name in self._names:
            yield from self._sums.spread(*sums.get(name, nothing))
            if is_whole:
                yield from self._presence(name)

    def _sums_in(self, reduced: Iterator[float], is_whole: bool) -> Totals:
        """What the vectors of all processes come to."""
        sums: Totals = {}
        for name in self._names:
            value, weight = self._sums.join(reduced, 2)
            sums[name] = value, weight
            if is_whole:
                _refuse_a_part(name, Presence(*islice(reduced, len(Presence._fields))))
        return sums

    def _presence(self, name: str) -> "Presence":
        """Of this process; a single output does not tell."""
        if self._outputs < 2:
            return Presence(0.0, 0.0)
        times = self._times[name]
        is_mixed = 0 < times < self._outputs
        return Presence(math.nan if is_mixed else float(times > 0), 1.0)


class Presence(NamedTuple):
    """In how many processes each output has a name. They add up: one NaN makes the sum NaN."""

    always: float  # NaN: a process has it in some of its outputs, e.g. by the batch
    processes: float


def _refuse_a_part(name: str, presence: Presence) -> None:
    always, processes = presence
    if not math.isnan(always) and 0 < always < processes:
        raise UserError(
            f"{int(always)} of {int(processes)} processes return {name!r} in each step and the "
            "others never, so it would be a mean over only some of the rows; return or log it on "
            "all of them"
        )


def _collect_all(several: Sequence[Means]) -> None:
    """Adds up what is kept. Outputs of the same names are read at once, e.g. those of many small
    sets."""
    by_names: dict[tuple[Any, ...], list[Means]] = {}
    for means in several:
        if means._kept:
            by_names.setdefault(tuple(means._kept[0][0]), []).append(means)
    for group in by_names.values():
        table = None
        if len(group) > 1:
            table = _alike([one for means in group for one in means._kept])
        if table is None:
            for means in group:
                means._collect()
            continue
        columns, weights = table
        begin = 0
        for means in group:
            part = slice(begin, begin + len(means._kept))
            begin = part.stop
            own = {name: column[part] for name, column in columns.items()}
            means._take(_counted(own, weights[part]), means._kept[0][0])


def pooled(several: Iterable[Means]) -> dict[str, float]:
    """The means over all that several have added, after their `total` was read."""
    return _divided(_joined([means._reduced or {} for means in several], True, 0.0))


def _alike(kept: list[Kept]) -> tuple[dict[str, list[float]], list[float]] | None:
    """The values of each name and the weights, of outputs that have the same names, each with
    tensors of one type: these are stacked by their places, and not looked at one by one. None: they
    differ."""
    names, table = list(kept[0][0]), [list(output.values()) for output, _ in kept]
    columns: dict[str, list[float]] = {}
    try:
        types = [value.dtype for value in table[0]]
        is_same = all(list(out) == names and not isinstance(out, Weighed) for out, _ in kept)
        if not is_same or any([value.dtype for value in row] != types for row in table):
            return None
        for kind in dict.fromkeys(types):
            places = [place for place, other in enumerate(types) if other is kind]
            together = torch.stack([row[place] for row in table for place in places]).detach()
            if kind.is_complex or together.numel() != len(places) * len(table):
                return None
            together = together.cpu().to(torch.float64).reshape(len(table), -1)  # waits for the GPU
            numbers = together.T.tolist()
            columns |= {names[place]: column for place, column in zip(places, numbers, strict=True)}
    except (AttributeError, TypeError, RuntimeError):  # numbers, or on several devices
        return None
    if not all(isinstance(name, str) for name in names):
        return None
    return columns, columns.pop("weight", None) or [float(rows) for _, rows in kept]


def _counted(columns: dict[str, list[float]], weights: list[float]) -> Columns:
    """Without the outputs of weight 0."""
    if all(weights):
        return {name: (column, weights) for name, column in columns.items()}
    own = [weight for weight in weights if weight]
    return {name: ([*compress(column, weights)], own) for name, column in columns.items()}


def _columns(kept: list[Kept]) -> Columns:
    """Of weight 0 there is the name alone: a mean over nothing may be NaN."""
    weighted = {name for output, _ in kept if "weight" in output for name in output}
    if weighted and any("weight" not in out and not weighted.isdisjoint(out) for out, _ in kept):
        raise UserError(SOMETIMES_WEIGHTED)
    counted = [(output, weight) for output, weight in kept if isinstance(weight, Tensor) or weight]
    names = [name for output, _ in counted for name in output]
    values = [value for output, _ in counted for value in output.values()]
    numbers = iter(_numbers(values, names))
    own = [w for out, _ in counted if isinstance(out, Weighed) for w in out.weights.values()]
    read = _numbers(
        [*(weight for _, weight in counted), *own], ["weight"] * (len(counted) + len(own))
    )
    weights, own_weights = read[: len(counted)], iter(read[len(counted) :])
    columns: Columns = {name: ([], []) for output, _ in kept for name in output}
    for name in columns:
        if not isinstance(name, str):
            raise UserError(f"a step returned {name!r} as a metric's name; use text, e.g. 'mae'")
    for (output, _), weight in zip(counted, weights, strict=True):
        of = output.weights if isinstance(output, Weighed) else {}
        its_own = {name: next(own_weights) for name in of}
        for name in output:
            value = next(numbers)
            if weight and (counts := its_own.get(name, weight)):
                columns[name][0].append(value)
                columns[name][1].append(counts)
    columns.pop("weight", None)
    return columns


def _joined(several: list[Any], counts: bool, zero: Any) -> Totals:
    sums: Totals = {}
    for part in several:
        for name, (value, weight) in part.items():
            before = sums.get(name, (zero, zero))
            sums[name] = (before[0] + value, before[1] + weight) if counts else before
    return sums


def _read(state: Mapping[str, Any], sums: Sums) -> Totals:
    return {name: (sums.read(value), sums.read(weight)) for name, (value, weight) in state.items()}


def fraction(of: Tensor) -> Tensor:
    """The mean of true and false, e.g. an accuracy, in the widest type that the device has."""
    return of.to(torch.float64 if has_float64(of.device) else torch.float32).mean()


def is_metric(module: Any) -> bool:
    """Whether it is one of torchmetrics, whose states are attributes."""
    torchmetrics = sys.modules.get("torchmetrics")  # who holds one has imported it
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def is_number(value: Any) -> bool:
    """Whether this is one number, or a tensor or an array that holds one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, int):
        return value.bit_length() < MOST_BITS
    return isinstance(value, float) or getattr(value, "size", 0) == 1


def described(value: Any) -> str:
    """What is wrong with a value that is not one number."""
    if isinstance(value, int):
        return "as a whole number that no float can hold; return a smaller one"
    if hasattr(value, "shape"):
        return "with more than one number; return its mean over the batch"
    return f"as a {type(value).__name__}; return one number, or leave it out"


def numbers_of(scalars: Mapping[str, Any]) -> dict[str, float]:
    """What `trainer.log` was given, as numbers; refused if one is none, or has no proper name."""
    for name, value in scalars.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise UserError(f"trainer.log got the name {name!r}; use a group and a name: val/extra")
        if not is_number(value):
            has_shape = hasattr(value, "shape")
            kind = f"shape {tuple(value.shape)}" if has_shape else f"type {type(value).__name__}"
            raise UserError(f"trainer.log got {name} with a value of {kind}; pass one number")
    return {name: float(value) for name, value in scalars.items()}


def _numbers(values: list, names: list[str]) -> list[float]:
    """The values of numbers and one-element tensors; waits once per device and dtype."""
    numbers = [0.0] * len(values)
    places: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if not is_number(value):
            raise UserError(f"a step returned '{names[index]}' {described(value)}")
        if isinstance(value, Tensor):
            places.setdefault((value.device, value.dtype), []).append(index)
        else:
            numbers[index] = float(value if isinstance(value, int | float) else value.item())
    for indexes in places.values():
        together = torch.stack([values[index].detach().reshape(()) for index in indexes])
        for index, number in zip(indexes, together.tolist(), strict=True):  # waits for the GPU
            numbers[index] = float(number)
    return numbers


def _divided(sums: Totals) -> dict[str, float]:
    means: dict[str, float] = {}
    for key, (value, weight) in sums.items():
        loss, is_part, name = key.partition(PART)
        if is_part and loss in sums:
            raise UserError(SOMETIMES_IN_PARTS)
        if weight and is_part:
            means[name] = value / weight
            means[loss] = means.get(loss, 0.0) + means[name]
        elif weight:
            means[key] = value / weight
    return means
