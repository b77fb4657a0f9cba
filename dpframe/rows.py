"""What a step may ask about all rows of its batch, beyond those of its share."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from dpframe import seeding
from dpframe.data import split
from dpframe.data.module import OfSets
from dpframe.errors import UserError
from dpframe.parameters import version_of


class CurrentShare(threading.local):
    """The share that this thread's step computes: replicas may have a thread each."""

    def __init__(self) -> None:
        self.rows = 0  # outside of a step
        self.total = 0
        self.places: Sequence[int] | None = None
        self.of_sets = False  # whether they are rows of several sets, some of each
        self.turn: str | None = None
        self.context: Any = None  # of the task that computes it
        self.draws = 0
        self.calls: dict[int, int] = {}  # of each layer that draws by row
        self.seed: Any = None  # of what these draw; None until the first one does
        self.keys: Any = None  # a number for each row
        self.keepers: tuple[Forward, ...] = ()  # of what is gathered
        self.gathered: Iterator[Any] | None = None  # while something is computed again

    def of(self, share: Any, context: Any, turn: str | None = None) -> "CurrentShare":
        """For a `with`: a step of this share, in training with the name of its turn. `context` is
        the task's."""
        _, self.rows, self.total, places = share
        self.of_sets = type(places) is OfSets
        self.places = sorted(places) if self.of_sets else places
        self.context, self.turn, self.draws = context, turn, 0
        self.calls, self.seed = {}, None
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.rows, self.context = 0, None  # which would keep the run


class Forward:
    """What a forward had that is computed again in the backward: its share, with as many draws, and
    the rows that it has gathered. For torch.utils.checkpoint it has two contexts."""

    def __init__(self) -> None:
        self._share = dict(vars(current_share))
        self._calls = dict(current_share.calls)
        self._gathered: list[tuple[Tensor, int | None] | None] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        with _changed(keepers=(*current_share.keepers, self)):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        own = {"calls": dict(self._calls), "keepers": (), "gathered": iter(self._gathered)}
        with _changed(**{**self._share, **own}):
            yield

    def keep(self, gathered: Tensor | None) -> None:
        """None: the rows of the share were all. A graph that is kept would keep itself."""
        if gathered is None:
            self._gathered.append(None)
        else:
            rows = gathered.detach().requires_grad_(gathered.requires_grad)
            self._gathered.append((rows, version_of(rows)))


class EachTime:
    """Contexts that are made each time they are entered: a graph may have several backwards."""

    def __init__(self, *contexts: Callable[[], Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextmanager
def buffers_kept(module: Any) -> Iterator[None]:
    """E.g. running statistics, which the first forward has updated already."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def _changed(**values: Any) -> Iterator[None]:
    """The current share with other values, in this thread."""
    before = {name: getattr(current_share, name) for name in values}
    vars(current_share).update(values)
    try:
        yield
    finally:
        vars(current_share).update(before)


current_share = CurrentShare()


class Ongoing:
    """What this process is doing."""

    watch: Any = None  # of what layers do in a trial


ongoing = Ongoing()
_tracker = ModuleTracker()


def is_backward() -> bool:
    """Whether autograd calls this, e.g. of a block that is computed again."""
    return _tracker.is_bw


def refuse_unlike_forward(who: str) -> None:
    """What is computed again without the contexts of its forward is not as it was there."""
    if is_backward() and current_share.gathered is None:
        raise UserError(
            f"{who} is computed again in the backward, where the step of its forward is not known; "
            "a model that recomputes activations by torch.utils.checkpoint needs "
            "context_fn=task.checkpoint_contexts there, or trainer.checkpoint_activations instead"
        )


OUTSIDE: dict[str, Callable[..., Any]] = {}


def outside_of_graphs(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compiler.disable, which imports dynamo, and would be another function each time."""
    if name not in OUTSIDE:
        OUTSIDE[name] = torch.compiler.disable(call)
    return OUTSIDE[name]


class OverridableProperty:
    """A property that a task of its own may set to something else, e.g. `self.rank = 8`."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, task: Any, kind: type) -> Any:
        return self if task is None else self.read(task)


class DrawnForAll(torch.Generator):
    """Of numbers that are drawn for all rows of a batch, whichever of them a replica has."""


class Context(Protocol):
    """What is asked of a TaskContext."""

    strategy: Any
    is_compiled: bool
    is_cut: bool
    seed: int
    batch_index: int

    @property
    def epoch(self) -> int: ...


class RowsOfBatch:
    """The part of a Task that knows of the other rows of its batch."""

    run_context: Context
    device: Any

    @OverridableProperty
    def batch_rows(self) -> int:
        """The rows of the whole batch that this step's share is of, over all replicas: a sum over
        rows is the same on any number of them as `loss * self.batch_rows / len(x)`."""
        return _within(self, "batch_rows").total

    def all_gather(self, x: Tensor) -> Tensor:
        """The whole batch's rows, in order, from those of this step's share. Gradients flow back to
        the replicas that they came from.

        The first dimension of `x` is the share's rows, or a multiple of them. Every replica has to
        call it as often. Under accumulation the batch is one of `data.batch_size` rows."""
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise UserError(
                f"{name}.all_gather got a {type(x).__name__}; pass a tensor, and call it for each"
            )
        if (strategy := _that_gathers(self.run_context, f"{name}.all_gather")) is None:
            return x
        if ongoing.watch is not None:
            ongoing.watch.gathers = True
        if rows := current_share.rows:
            refuse_unlike_forward(f"{name}.all_gather")
            _refuse_pieces(self.run_context, f"{name}.all_gather")
        if rows and (not x.ndim or not len(x) or len(x) % rows):
            raise UserError(
                f"{name}.all_gather got a tensor of shape {tuple(x.shape)} for a share of {rows} "
                "rows; make these rows, or a multiple of them, its first dimension"
            )
        if current_share.gathered is not None:
            return _gathered_before(x, f"{name} changes in place what self.all_gather gave")
        gathered = strategy.gather_rows(x, current_share.total if rows else 0)
        if rows and gathered is not x and current_share.of_sets:
            if len(x) != rows:
                raise UserError(
                    f"{name}.all_gather got {len(x)} rows in a share of {rows} rows of several "
                    "sets; gather a tensor with one row for each"
                )
            places = torch.tensor(current_share.places, device=x.device)
            order = strategy.gather_rows(places, current_share.total)
            gathered = gathered[order.argsort()]
        return _kept(None if gathered is x else gathered, x)

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """For a step that calls torch.utils.checkpoint itself, with `use_reentrant=False` and
        `context_fn=self.checkpoint_contexts`: what is computed again draws and gathers the same."""
        forward = Forward()
        return forward.kept(), EachTime(forward.again)

    def randn_rows(self, *size: int, device: Any = None, dtype: Any = None) -> Tensor:
        """As torch.randn, whose first dimension is the rows of this step's share: each row gets the
        same numbers on any number of replicas, and on any device.

        They follow from the seed, the batch and how often the step has drawn; in an evaluation
        they are the same each time. They are drawn on the CPU, for all rows of the batch; with
        `device`, e.g. a GPU, they are drawn there, which is faster, and are others."""
        return _drawn(self, "randn_rows", size, device=device, dtype=dtype)

    def rand_rows(self, *size: int, device: Any = None, dtype: Any = None) -> Tensor:
        """The same as torch.rand."""
        return _drawn(self, "rand_rows", size, device=device, dtype=dtype)


def gather_shares(x: Tensor, who: str) -> Tensor:
    """`x` of each share of the batch at hand, one row a share, for `who`. All that have rows call
    it."""
    if (strategy := _that_gathers(current_share.context, who)) is None:
        return x[None]
    _refuse_pieces(current_share.context, who)
    if current_share.gathered is not None:
        return _gathered_before(x[None], f"{who} changes in place what it gathered")
    shares = [part for part in split(range(current_share.total), strategy.replicas) if part]
    return _kept(strategy.gather_shares(x, len(shares)), x)


def _refuse_pieces(context: Context, who: str) -> None:
    if context.is_cut and current_share.turn is not None:
        raise UserError(
            f"{who} wants all rows of a batch, and trainer.micro_batch computes some at a time; "
            "use trainer.micro_batch=null"
        )


def _kept(gathered: Tensor | None, own: Tensor) -> Tensor:
    """For a block that is computed again; None: there is nothing but what is its own."""
    for keeper in current_share.keepers:
        keeper.keep(gathered)
    return own if gathered is None else gathered


def _gathered_before(x: Tensor, changes: str) -> Tensor:
    """In the forward: the other replicas don't gather again."""
    assert current_share.gathered is not None
    if (kept := next(current_share.gathered)) is None:
        return x
    rows, version = kept
    if version_of(rows) != version:
        raise UserError(
            f"{changes} to a block that is computed again in the backward; change a copy of it"
        )
    return rows


def _that_gathers(context: Any, who: str) -> Any:
    """The strategy; None without a run."""
    strategy = context.strategy
    if strategy and context.is_compiled and strategy.replicas > strategy.world_size:
        raise UserError(
            f"{who} can't be compiled for several replicas in one process; use strategy=ddp or "
            "trainer.compile.mode=null"
        )
    return strategy


def _drawn(task: Any, name: str, size: Any, **options: Any) -> Tensor:
    # A generator is no part of a graph.
    draw = outside_of_graphs("draw", _draw) if torch.compiler.is_compiling() else _draw
    sizes = size[0] if size and isinstance(size[0], list | tuple) else size
    numbers = [
        each for each in sizes if hasattr(each, "__index__") and not getattr(each, "ndim", 0)
    ]
    if not numbers or len(numbers) < len(sizes):
        raise UserError(
            f"{type(task).__name__}.{name} got the size {str(size)[:40]!r}; pass whole numbers, "
            f"the first of which is the rows, e.g. {name}(len(x), 8)"
        )
    return draw(task, name, *(int(each) for each in sizes), **options)


def _draw(task: Any, name: str, first: int, *rest: int, device: Any, dtype: Any) -> Tensor:
    draw = torch.randn if name == "randn_rows" else torch.rand
    # Without an index: in a replica's thread that is the replica's GPU.
    there = torch.device(task.device.type if device is None else device)
    if task.run_context.strategy is None and not current_share.rows:  # by hand, without a run
        return draw(first, *rest, device=there, dtype=dtype)
    share, context = _within(task, name), task.run_context
    if first != share.rows:
        raise UserError(
            f"{type(task).__name__}.{name} was asked for {first} rows in a share of {share.rows}; "
            "make these rows the first dimension"
        )
    by = () if share.turn is None else (context.epoch, crc32(share.turn.encode()))
    seed = seeding.mix(context.seed, *by, context.batch_index, share.draws)
    share.draws += 1
    device = torch.device("cpu" if device is None else device)
    generator = DrawnForAll(device).manual_seed(seed)
    # A trial of fewer rows compares them with the same ones of all: torch may draw others for them.
    total = share.total if ongoing.watch is None else max(share.total, ongoing.watch.most)
    drawn = draw(total, *rest, generator=generator, device=device, dtype=dtype)
    if share.rows != total:
        drawn = drawn[torch.as_tensor(share.places, device=device)]
    return drawn.to(there)


def _within(task: Any, name: str) -> CurrentShare:
    """The share of the step at hand, whose place in its batch is known."""
    refuse_unlike_forward(f"{type(task).__name__}.{name}")
    if not current_share.rows:
        raise UserError(f"{type(task).__name__}.{name} was used outside of a step")
    if not current_share.total or current_share.places is None:
        raise UserError(
            f"{type(task).__name__}.{name} can't be computed where ranks have rows of their own; "
            "give all rows in each process"
        )
    return current_share
