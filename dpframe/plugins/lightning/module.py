"""A LightningModule as it is, with dpframe behind the methods that ask Lightning's Trainer."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpframe import UserError

PACKAGES = ("lightning", "pytorch_lightning")  # which are the same library under two names
BASES = ("LightningModule", "LightningDataModule")
UNCALLED = {  # what a module may override in Lightning, and why it is refused
    "optimizer_zero_grad": "gradients are None at the beginning of each step; leave it out",
    "configure_callbacks": "they are Lightning's; set callbacks.* in the config",
    "configure_sharded_model": "build the layers in __init__, setup or configure_model",
    "on_validation_model_zero_grad": "gradients are None there; leave it out",
    "training_epoch_end": "it is Lightning 1's; write on_train_epoch_end",
    "validation_epoch_end": "it is Lightning 1's; write on_validation_epoch_end",
    "test_epoch_end": "it is Lightning 1's; write on_test_epoch_end",
    **dict.fromkeys(
        (
            *("on_validation_model_eval", "on_validation_model_train", "on_test_model_eval"),
            *("on_test_model_train", "on_predict_model_eval"),
        ),
        "an evaluation is in evaluation mode, and puts back each module's mode after it",
    ),
}


def is_a(kind: str, value: Any) -> bool:
    """Whether this is Lightning's LightningModule, say, without importing it."""
    return any(base.__name__ == kind and _package(base) in PACKAGES for base in type(value).__mro__)


def family(module: Any) -> str:
    """The package that the module's class is from: `lightning.pytorch` or `pytorch_lightning`."""
    return _base(_kind(module)).__module__.removesuffix(".core.module")


def own_class(module: Any) -> type:
    """The class that the user has written."""
    kind = _kind(module)
    return kind.__mro__[2] if issubclass(kind, Adapted) else kind


def owns(module: Any, name: str) -> bool:
    """Whether the user's class has written this itself."""
    kind = _kind(module)
    return getattr(kind, name, None) is not getattr(_base(kind), name, None)


def adapt(module: Any) -> None:
    """Gives the module, and those in it, a class below their own, as torch's parametrizations and
    fully_shard do: an object that exists can't be made by another constructor."""
    for part in module.modules():
        if is_a("LightningModule", part) and not isinstance(part, Adapted):
            part.__class__ = _adapted(_kind(part))


def call(method: Callable[..., Any], *args: Any) -> Any:
    """Calls with as many of the arguments as it takes: Lightning's hooks may leave out the last."""
    return method(*args[: _places(getattr(method, "__func__", method), inspect.ismethod(method))])


def refuse_uncalled(module: Any) -> None:
    name = type(module).__name__
    for method, why in UNCALLED.items():
        if hasattr(module, method) and owns(module, method):
            raise UserError(f"{name}.{method} is never called here: {why}")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UserError(
            f"{name}.training_step takes a dataloader_iter: no batch of it could be divided over "
            "replicas; take a batch"
        )


class Adapted:
    """What a LightningModule asks of Lightning's Trainer by names that are not documented."""

    trainer: Any
    training: bool
    modules: Callable[[], Any]
    parameters: Callable[[], Any]
    named_modules: Callable[[], Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles by the user's own class, which a pickle can name."""
        made: Any = super().__reduce_ex__(protocol)
        return _made_again, (own_class(self),), *made[2:]

    def __getattr__(self, name: str) -> Any:
        """Torch asks here where a property has raised an AttributeError, whose text says why."""
        found = inspect.getattr_static(type(self), name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def _task(self) -> Any:
        return self.trainer.task

    @property
    def device(self) -> torch.device:
        weight = next(iter(self.parameters()), None)
        return torch.device("cpu") if weight is None else weight.device

    @property
    def dtype(self) -> torch.dtype:
        types = (w.dtype for w in self.parameters() if w.is_floating_point())
        return next(types, torch.get_default_dtype())

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """See Lightning's; what is logged is an exact mean over rows, on every strategy."""
        if isinstance(value, Mapping):
            for part, number in value.items():
                self.log(f"{name}/{part}", number, *args, **options)
            return
        given = _arguments_of_log(_kind(self)).bind(self, name, value, *args, **options)
        given.apply_defaults()
        attribute = given.arguments["metric_attribute"]
        metric = value if is_metric(value) else self._task.numbers.metric_of(value)
        if metric is not None and attribute is None:
            paths = (path for path, part in self.named_modules() if part is metric)
            attribute = next(paths, None)
        if metric is not None and attribute and given.arguments["reduce_fx"] == "mean":
            value = metric
        self._task.numbers.add(
            name,
            value,
            attribute,
            batch_size=given.arguments["batch_size"],
            reduce_fx=given.arguments["reduce_fx"],
            on_epoch=given.arguments["on_epoch"],
        )

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        is_wrapped = use_pl_optimizer and self._task.optimizes_by_hand
        several = self._task.by_hand.steppers if is_wrapped else self._task.optimizers
        return several[0] if len(several) == 1 else list(several)

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        if getattr(self, "automatic_optimization", True):
            raise UserError(
                f"{type(self).__name__}.manual_backward is for manual optimization; set "
                "self.automatic_optimization = False in __init__"
            )
        self._task.by_hand.backward(loss, *args, **options)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = self.trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if limit and (gradient_clip_algorithm or self.trainer.gradient_clip_algorithm) == "value":
            nn.utils.clip_grad_value_(weights, limit)
        elif limit:
            nn.utils.clip_grad_norm_(weights, limit)

    @property
    def batch_rows(self) -> int:
        """dpframe's, which Lightning has not: the rows of the whole batch, over all replicas."""
        return self._task.batch_rows

    def randn_rows(self, *size: Any, **options: Any) -> Tensor:
        """dpframe's, as torch.randn: a row has the same noise on any number of replicas."""
        return self._task.randn_rows(*size, **options)

    def rand_rows(self, *size: Any, **options: Any) -> Tensor:
        return self._task.rand_rows(*size, **options)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The rows of the whole batch, as one process has them: without a dimension of ranks."""
        if isinstance(data, Mapping):
            return {k: self.all_gather(v, group, sync_grads) for k, v in data.items()}
        if isinstance(data, list | tuple):
            return type(data)(self.all_gather(part, group, sync_grads) for part in data)
        rows = self._task.all_gather(data)
        return rows if sync_grads else rows.detach()


def is_metric(value: Any) -> bool:
    return any(
        base.__name__ == "Metric" and _package(base) == "torchmetrics"
        for base in type(value).__mro__
    )


def _made_again(kind: Any) -> Any:
    adapted: Any = _adapted(kind)
    return adapted.__new__(adapted)


@cache
def _adapted(kind: Any) -> type:
    inner = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Adapted, kind), inner)


@cache
def _arguments_of_log(kind: Any) -> inspect.Signature:
    """Those of Lightning's `self.log`."""
    return inspect.signature(_base(kind).log)  # type: ignore[attr-defined]


@cache
def _base(kind: Any) -> type:
    theirs = (base for base in kind.__mro__ if _package(base) in PACKAGES)
    return next(base for base in theirs if base.__name__ in BASES)


@cache
def _places(function: Callable[..., Any], is_bound: bool) -> int:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 99
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in named for kind in kinds) - is_bound


def _kind(value: Any) -> Any:
    return type(value)


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]
