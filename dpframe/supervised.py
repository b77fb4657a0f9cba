"""Supervised: a network, a loss and metrics as a task, for who needs no class of their own."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpframe.errors import UserError, nearest
from dpframe.named_metrics import NamedMetrics
from dpframe.parameters import unwrapped
from dpframe.task import Output, Task
from dpframe.values import parameters_of

MEANS = ("mean", "batchmean")  # over the rows
NAMES = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
}
COUNTED = ("cross_entropy", "nll_loss")  # a mean over targets that are weighed or left out
WANTS_FLOATS = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": partial(torch.softmax, dim=1),
    "nll_loss": torch.exp,
    "binary_cross_entropy_with_logits": torch.sigmoid,
}
IGNORED = -100  # torch's default


class Supervised(Task):
    """Trains `net` by a loss of (prediction, target), where a batch is (input, target).

    `loss` is a module of torch.nn, a function, or a name in torch.nn.functional, e.g.
    "cross_entropy": a mean over rows. Without an `optimizer` it is torch's Adam. `metrics` are
    measured in validation and test, by name: objects of torchmetrics, which get probabilities where
    the loss takes logits, or functions of (prediction, target) that give a value for each row.
    `input` and `target` are the keys of batches that are dicts, e.g. "image" and "label", or the
    places in longer ones.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | Callable[..., Tensor] | str,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        input: str | int | None = None,
        target: str | int | None = None,
    ) -> None:
        super().__init__(net, optimizer or Adam, scheduler)
        if (input is None) is not (target is None):
            raise UserError("Supervised: input and target are the keys of a batch; pass both")
        self.keys = None if input is None else (input, target)
        self.loss = _function(loss) if isinstance(loss, str) else loss
        _check(self.loss)
        self.metrics = NamedMetrics(metrics)
        self._name = _name(self.loss)
        self._is_of_torch = _origin(self.loss).__module__.startswith("torch.nn.")
        self._ignored = _option(self.loss, "ignore_index", IGNORED)
        self._weights = _option(self.loss, "weight", None)
        is_other = self._weights is not None or self._ignored != IGNORED
        self._is_counted = self._name in COUNTED and is_other
        if self._is_counted and self.metrics.functions:
            raise UserError(
                f"task.metrics.{min(self.metrics.functions)} is a mean over rows, and the loss one "
                "over targets that it weighs or ignores; use a metric of torchmetrics"
            )

    def training_step(self, batch: Any) -> Output:
        x, target = self._parts(batch)
        return self._measured(self.net(x), target)

    def validation_step(self, batch: Any) -> Output:
        x, target = self._parts(batch)
        prediction = self.net(x)
        measured = self._measured(prediction, target)
        # For numbers between 0 and 1 torchmetrics takes logits for probabilities, batch by batch.
        normalize = PROBABILITIES.get(self._name)
        self.metrics.update(normalize(prediction) if normalize else prediction, target)
        return {**measured, **self.metrics.means(prediction, target)}

    def predict_step(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):  # of a data set without targets
            return self.net(batch)
        key = self.keys[0] if self.keys else 0
        try:
            x = batch[key]
        except (KeyError, IndexError, TypeError):
            raise self._unfit(batch) from None
        return self.net(x)

    def _parts(self, batch: Any) -> Any:
        try:
            if self.keys and not isinstance(batch, Tensor):
                return batch[self.keys[0]], batch[self.keys[1]]
        except (KeyError, IndexError, TypeError):
            raise self._unfit(batch) from None
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise self._unfit(batch)
        return batch

    def _measured(self, prediction: Any, target: Any) -> Output:
        given = target
        if self._is_of_torch and isinstance(prediction, Tensor) and isinstance(target, Tensor):
            if self._name in WANTS_FLOATS and not target.is_floating_point():
                given = target.to(prediction.dtype)
            if given.is_floating_point() and prediction.shape != target.shape:
                raise UserError(
                    f"Supervised: the net gives {list(prediction.shape)} and the target is "
                    f"{list(target.shape)}, which the loss would broadcast; give both the same "
                    "shape, e.g. by targets of [rows, 1]"
                )
        loss: Any = self.loss
        output = {"loss": loss(prediction, given)}
        if self._is_counted and not target.is_floating_point():
            output["weight"] = self._count(target)
        return output

    def _count(self, target: Tensor) -> Tensor:
        """What the loss is a mean over: the targets that it does not ignore, by their weights."""
        is_seen = target != self._ignored
        if self._weights is None:
            return is_seen.sum()
        weights = getattr(self.loss, "weight", self._weights)  # a module's are on the task's device
        return (weights[target.masked_fill(~is_seen, 0)] * is_seen).sum()

    def _unfit(self, batch: Any) -> UserError:
        what = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            what += f" of {', '.join(map(str, batch))}"
        elif isinstance(batch, list | tuple):
            what += f" of {len(batch)}"
        if self.keys:
            wanted = f"one with {self.keys[0]!r} and {self.keys[1]!r}; set task.input"
        else:
            wanted = "(input, target); name its keys by task.input"
        return UserError(f"Supervised: a batch is {what}, not {wanted} and task.target")


def _function(name: str) -> Callable[..., Any]:
    found = getattr(functional, name, None)
    if found is not None and "reduction" in parameters_of(found):
        return found
    losses = [n for n, each in vars(functional).items() if "reduction" in parameters_of(each)]
    near = nearest(name, losses)
    hint = f"did you mean {near}?" if near else "name one, e.g. cross_entropy or mse_loss"
    raise UserError(f"task.loss={name} is no loss of torch.nn.functional; {hint}")


def _check(loss: Any) -> None:
    if isinstance(loss, type) or not callable(loss):
        given = loss.__name__ if isinstance(loss, type) else repr(loss)
        raise UserError(
            f"Supervised: loss={given[:80]}; pass an object, e.g. torch.nn.CrossEntropyLoss(), "
            'a function, or a name, e.g. "cross_entropy"'
        )
    reduction = _option(loss, "reduction", "mean")
    if reduction not in MEANS:
        raise UserError(
            f"Supervised: the loss has reduction={reduction!r}, so it would depend on the number "
            'of replicas; use reduction="mean"'
        )


def _option(loss: Any, name: str, default: Any) -> Any:
    """An option of a module, or of a function what a partial or its signature says."""
    if isinstance(loss, nn.Module):
        return getattr(loss, name, default)
    parameter = parameters_of(loss).get(name)
    is_set = parameter is not None and parameter.default is not parameter.empty
    return parameter.default if parameter and is_set else default


def _name(loss: Any) -> str:
    """In torch.nn.functional; "" of another one."""
    if isinstance(loss, nn.Module):
        return next((name for kind, name in NAMES.items() if isinstance(loss, kind)), "")
    function = _origin(loss)
    name = getattr(function, "__name__", "")
    return name if getattr(functional, name, None) is function else ""


def _origin(loss: Any) -> Any:
    """The function or class: a partial may be one of a partial."""
    loss, _ = unwrapped(loss)
    return type(loss) if isinstance(loss, nn.Module) or not inspect.isroutine(loss) else loss
