"""CUDA graphs: a step whose shapes stay the same is recorded once, and then launched as one.

What a recorded step does in Python it does once: a task that counts its calls, or draws numbers
from `random`, is not for this. Nobody has seen it on a GPU yet, so trainer.cuda_graph is off.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpframe.data import Batch, Share
from dpframe.errors import UserError
from dpframe.task import TrainStep
from dpframe.trainer.update import Update

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

WARM_STEPS = 3  # run as ever: they make the optimiser's state and pick the kernels
RECORDINGS = 3  # after so many the settings change too often for it to be worth it
RATED = ("SGD", "Adam", "AdamW")  # whose fused kernels read the learning rate from the device
log = logging.getLogger("dpframe")


def check(trainer: "Trainer") -> None:
    """Refuses what trainer.cuda_graph=true asks for and can't be had."""
    if trainer.settings.cuda_graph is True and (why := misfit(trainer)):
        raise UserError(_refusal(why))


def set_up(trainer: "Trainer") -> None:
    """Has recorded steps take over where that was asked for and can be; the log is open by now."""
    if trainer.settings.cuda_graph is False:
        return
    why = misfit(trainer)
    if not why:
        recorder = Recorder(trainer.strategy.device)
        trainer._train_step = Graphed(trainer, recorder).train_step  # type: ignore[method-assign]
    else:
        log.info("no CUDA graph: %s", why)


def misfit(trainer: "Trainer") -> str:
    """Why this run's steps can't be recorded; empty where they can."""
    strategy, settings = trainer.strategy, trainer.settings
    reasons = (
        (strategy.device.type != "cuda", f"the steps run on {strategy.device}"),
        (strategy.replicas > 1, f"{strategy.name} has {strategy.replicas} replicas"),
        (not isinstance(trainer.step, TrainStep), f"{strategy.name} has its own way to a step"),
        (trainer._syncs_weights, f"{strategy.name} looks after the weights between steps"),
        (settings.accumulate > 1, f"a step is trainer.accumulate={settings.accumulate} batches"),
        (trainer.update.scaler is not None, f"trainer.precision={settings.precision} is scaled"),
        (settings.on_nonfinite == "skip", "trainer.on_nonfinite=skip looks at each loss"),
        (settings.compile, "trainer.compile=true launches the steps its own way"),
        (settings.profile, "trainer.profile=true waits for each part of a step"),
    )
    found = [why for is_so, why in reasons if is_so]
    return found[0] if found else unrecordable(trainer.update)


def unrecordable(update: Update) -> str:
    """Why an optimiser's step would not be the same when it is launched again."""
    optimizer, groups = update.optimizer, update.optimizer.param_groups
    name = type(optimizer).__name__
    is_rated = name in RATED and all(group.get("fused") for group in groups)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is not one of torch's optimisers"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks around its step"
    if not is_rated and not all(group.get("capturable") for group in groups):
        return f"{name} is neither fused nor told task.optimizer.capturable=true"
    if update.scheduler is None:
        return ""
    schedule = type(update.scheduler).__name__
    if getattr(update.scheduler, "cycle_momentum", False):
        return f"{schedule} changes the momentum; give task.scheduler.cycle_momentum=false"
    return "" if is_rated else f"{name} can't have {schedule}'s rates but with fused=true"


class Unfit(Exception):
    """What a step has returned can't be recorded."""


class Graphed:
    """In place of `Trainer._train_step`, which takes what is not of the recorded kind."""

    def __init__(self, trainer: "Trainer", recorder: "Recorder") -> None:
        self._trainer = trainer
        self._one_by_one = trainer._train_step
        self._recorder = recorder
        self._kind: Any = None  # of the batches that are recorded
        self._seen: Counter[Any] = Counter()
        self._recordings = 0

    def train_step(self, batches: list[Batch]) -> None:
        trainer = self._trainer
        share = trainer.to_device(batches[0].shares)
        kind = kind_of(share, trainer.strategy.device)
        wants_norm = (trainer.global_step + 1) % trainer.settings.log_every == 0
        if kind is None or (wants_norm and trainer.settings.clip_norm is None):
            self._one_by_one(batches)
        elif kind == self._kind and self._facts() == self._recorded_facts:
            self._replay(batches[0], share)
        elif kind == self._kind:
            self._begin_anew(batches)
        elif self._kind is not None:
            self._one_by_one(batches)
        elif self._is_warm(kind) and self._record(kind, share):
            self._replay(batches[0], share)
        elif self._recorder.is_used:
            self._recorder.warm(partial(self._one_by_one, batches))
        else:
            self._one_by_one(batches)

    def _is_warm(self, kind: Any) -> bool:
        self._seen[kind] += 1
        return self._seen[kind] > WARM_STEPS

    def _record(self, kind: Any, share: Share) -> bool:
        """Whether it was; a recording computes nothing, so the weights are as they were."""
        update = self._trainer.update
        try:
            if why := misfit(self._trainer):
                raise Unfit(why)
            self._inputs = copied(share)
            self._rates = self._new_rates()
            with self._recordable():
                self._values = self._recorder.record(self._step)
        except (Unfit, RuntimeError) as error:
            for parameter in update.parameters:
                parameter.grad = None
            update.grad_norm = float("nan")
            self._tell(error)
            self._give_up()
            return False
        self._kind, self._norm = kind, update.grad_norm
        self._modules = list(self._trainer.task.modules())
        self._recorded_facts = self._facts()
        log.info("a CUDA graph from step %s on", self._trainer.global_step + 1)
        return True

    def _step(self) -> Tensor:
        """All of a step from its static inputs; what it has measured, as one tensor."""
        trainer, rows = self._trainer, self._inputs.rows
        loss, ((_, output),) = trainer.step(self._inputs, rows / trainer.strategy.averaged_over)
        for name, value in output.items():
            if name == "weight" or not isinstance(value, Tensor):
                what = f"'{name}' as a {type(value).__name__}"
                raise Unfit(f"{type(trainer.task).__name__}.training_step returned {what}")
        self._names = list(output)
        trainer.update.backward(loss)
        trainer.update.step(rows, [], wants_norm=False)
        return torch.stack([value.reshape(()).double() for value in output.values()])

    def _replay(self, batch: Batch, share: Share) -> None:
        trainer, update = self._trainer, self._trainer.update
        copy_into(self._inputs, share)
        for rate, group in self._rates:
            if rate.value != group["lr"]:
                rate.fill(group["lr"])
        self._recorder.replay()
        update.grad_norm = self._norm
        # The next replay writes where this one did.
        output = dict(zip(self._names, self._values.clone().unbind(), strict=True))
        trainer.guard.refuses(trainer, [(share.rows, output)], trainer.batches_done)
        trainer.means.add([(share.rows, output)])
        if update.schedules_steps:
            update.scheduler.step()
        trainer.global_step += 1
        trainer.batches_done += 1
        trainer.rows_seen += batch.rows

    def _begin_anew(self, batches: list[Batch]) -> None:
        """A weight has thawed, or a setting changed: what was recorded does not know of it."""
        self._kind = None
        self._seen.clear()
        self._recordings += 1
        if self._recordings >= RECORDINGS:
            log.warning("no CUDA graph any more: the optimiser's settings keep changing")
            self._give_up()
        self._one_by_one(batches)

    def _facts(self) -> Any:
        """What a recording holds for good, but for the numbers on the device."""
        update = self._trainer.update
        rated = {id(group) for _, group in self._rates}
        settings = [
            {
                key: value
                for key, value in group.items()
                if not (isinstance(value, Tensor) or key == "params")
                and not (key == "lr" and id(group) in rated)
            }
            for group in update.optimizer.param_groups
        ]
        trained = [parameter.requires_grad for parameter in update.parameters]
        return settings, trained, [module.training for module in self._modules]

    def _new_rates(self) -> "list[tuple[Rate, dict[str, Any]]]":
        """Without a schedule a rate is recorded as it is, in double precision."""
        update, device = self._trainer.update, self._trainer.strategy.device
        groups = update.optimizer.param_groups if update.scheduler is not None else []
        rated = [group for group in groups if not isinstance(group["lr"], Tensor)]
        return [(Rate(group["lr"], device), group) for group in rated]

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        """What the optimiser has to look like for torch to record it; outside, all is as ever."""
        update = self._trainer.update
        groups = update.optimizer.param_groups
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        schedules_steps, update.schedules_steps = update.schedules_steps, False
        try:
            for group in groups:
                if "capturable" in group:
                    group["capturable"] = True
            for rate, group in self._rates:
                group["lr"] = rate.tensor
            yield
        finally:
            update.schedules_steps = schedules_steps
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def _give_up(self) -> None:
        vars(self._trainer).pop("_train_step", None)
        self._recorder.is_used = False

    def _tell(self, error: Exception) -> None:
        if not isinstance(error, Unfit):
            first = str(error.__context__ or error).strip().splitlines()
            log.warning("no CUDA graph, as recording one failed: %s", first[0] if first else error)
        elif self._trainer.settings.cuda_graph is True:
            raise UserError(_refusal(str(error))) from None
        else:
            log.info("no CUDA graph: %s", error)


class Rate:
    """A learning rate on the device, and what it is known to be there."""

    def __init__(self, value: float, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.float32, device=device)
        self.fill(value)

    def fill(self, value: float) -> None:
        self.value = value
        self.tensor.fill_(value)


class Recorder:
    """Records what is launched on a stream, and launches it again."""

    is_used = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def warm(self, step: Callable[[], None]) -> None:
        """On the stream of the recording to come, as torch asks for."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def record(self, step: Callable[[], Tensor]) -> Tensor:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        number = self._device.index or 0
        generator = torch.cuda.default_generators[number]
        random_state = generator.clone_state()
        try:
            # Torch leaves its own stream only after a recording that has gone well. The mode:
            # threads of ours may pin memory meanwhile, which is no part of this.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool, self._side, capture_error_mode="thread_local"),
            ):
                values = step()
        except BaseException:
            graph.reset()
            generator.graphsafe_set_state(random_state)  # the old one may believe it is recorded
            # So may the allocator, in older torch: it would keep all memory that streams share.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(number, pool)
            raise
        self._graph = graph
        return values

    def replay(self) -> None:
        self._graph.replay()


def kind_of(value: Any, device: torch.device) -> Any:
    """The shapes of a batch; None where there is more to it than tensors on `device`."""
    if isinstance(value, Tensor):
        is_there = value.device.type == device.type
        return (value.shape, value.dtype, value.stride()) if is_there else None
    if isinstance(value, Share):
        inner = kind_of(value.batch, device)
        return None if inner is None else (value.rows, inner)
    if isinstance(value, dict):
        parts = [kind_of(part, device) for part in value.values()]
        return None if None in parts else (*value, *parts)
    if isinstance(value, (list, tuple)):
        parts = [kind_of(part, device) for part in value]
        return None if None in parts else (type(value), *parts)
    return None


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, Share):
        return Share(copied(value.batch), value.rows)
    parts = [copied(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def copy_into(target: Any, value: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(value, non_blocking=True)
    elif isinstance(target, Share):
        copy_into(target.batch, value.batch)
    elif isinstance(target, dict):
        for key, part in target.items():
            copy_into(part, value[key])
    else:
        for part, given in zip(target, value, strict=True):
            copy_into(part, given)


def _refusal(why: str) -> str:
    return f"trainer.cuda_graph=true but {why}; mend that, or use trainer.cuda_graph=auto"
