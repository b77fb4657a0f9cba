"""Which names a config may call: parts, what their packages define, and a list from PyTorch."""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn, optim
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, Sampler

from dpframe.callbacks import Callback
from dpframe.config.compose import Composed
from dpframe.config.locate import (
    LIGHTNING,
    locate,
    no_module,
    not_a_maker,
    parts_of,
    refuse_unsaid,
    see_own_folders,
    spec_of,
)
from dpframe.config.schema import RunSettings, is_off
from dpframe.data import DataModule
from dpframe.errors import UserError, nearest
from dpframe.loggers import Logger
from dpframe.strategies import Strategy
from dpframe.task import Task

# What the tasks and data of dpframe.lightning take, by their keys: each is a part as they are.
THEIRS = {
    "task.module": ("dpframe.lightning.Lightning", "LightningModule"),
    "data.module": ("dpframe.lightning.LightningData", "LightningDataModule"),
}
NEVER_WHOLE = {"torch", "dpframe", *sys.stdlib_module_names}  # a part vouches for nothing else
OURS = (Task, DataModule, Callback, Logger, Strategy, nn.Module, Dataset, Sampler)
# These set attributes by any name, or pass any calls on.
NOT_LAYERS = ("Container", "ParameterDict")
# A list by name: whatever these are given, none imports or calls what a text names, sets an
# attribute or writes a file. All that is in torch's modules leads to `os.system` somewhere.
FUNCTIONS = {
    "builtins": "dict list tuple set frozenset range slice",
    "collections": "OrderedDict",
    "torch": "abs cos exp log_softmax prelu relu rrelu selu celu sigmoid sin softmax tanh",
    "torch.nn.init": " ".join(nn.init.__all__),
    "torch.nn.utils.parametrizations": " ".join(parametrizations.__all__),
    "torch.optim.swa_utils": """
        AveragedModel SWALR get_ema_avg_fn get_ema_multi_avg_fn get_swa_avg_fn get_swa_multi_avg_fn
    """,
    "torch.nn.functional": """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d affine_grid alpha_dropout avg_pool1d avg_pool2d
        avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits celu
        channel_shuffle conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
        cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout dropout1d dropout2d
        dropout3d elu embedding embedding_bag feature_alpha_dropout fold fractional_max_pool2d
        fractional_max_pool3d gaussian_nll_loss gelu glu grid_sample group_norm gumbel_softmax
        hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss instance_norm
        interpolate kl_div l1_loss layer_norm leaky_relu linear linear_cross_entropy
        local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d
        margin_ranking_loss max_pool1d max_pool2d max_pool3d max_unpool1d max_unpool2d max_unpool3d
        mish mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
        normalize one_hot pad pairwise_distance pdist pixel_shuffle pixel_unshuffle
        poisson_nll_loss prelu relu relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid
        silu smooth_l1_loss soft_margin_loss softmax softmin softplus softshrink softsign tanh
        tanhshrink threshold triplet_margin_loss triplet_margin_with_distance_loss unfold upsample
    """,
}


def trust_of(job: Composed) -> "Trust":
    """What the parts of a config let it call. The package of one part may define another's."""
    typed = frozenset(job.settings.trusted_modules)
    trust = Trust(
        typed | set(job.plugins), typed=typed, closed=_closed(job), config_dir=job.config_dir
    )
    vouched = trust
    for where, node, kind in slots(job.settings):
        path = node.get("_target_") if isinstance(node, Mapping) else None
        if isinstance(path, str):
            with suppress(UserError):  # `build.check` raises it
                vouched = vouched.within(trust.part(path, where, kind))
    return with_theirs(vouched, {"task": job.settings.task, "data": job.settings.data})


def with_theirs(trust: "Trust", parts: Mapping[str, Any]) -> "Trust":
    """Lightning's modules in these parts are parts, too, and vouch for their packages."""
    for where, (owner, _) in THEIRS.items():
        part, _, name = where.partition(".")
        node = parts.get(part, {})
        inner = node.get(name) if node.get("_target_") == owner else None
        if isinstance(inner, Mapping) and isinstance(inner.get("_target_"), str):
            trust = replace(trust, theirs=trust.theirs | {where})
            with suppress(UserError):  # `build.check` raises it
                trust = trust.within(trust.nested(inner["_target_"], where))
    return trust


def slots(settings: RunSettings) -> Iterator[tuple[str, Any, type]]:
    """Each part's key, node and kind, but for callbacks and loggers that are switched off."""
    yield "strategy", settings.strategy, Strategy
    yield "task", settings.task, Task
    yield "data", settings.data, DataModule
    for group, kind in (("callbacks", Callback), ("logger", Logger)):
        for name, node in getattr(settings, group).items():
            if not is_off(node):
                yield f"{group}.{name}", node, kind


@dataclass(frozen=True)
class Trust:
    """`packages` may be called: what is defined in them, whatever name leads to it.

    `typed` are those of `packages` that the command line names. Nothing is imported from within
    `closed`: the run directory or the checkpoint's folder that a run starts from.
    """

    packages: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()
    closed: tuple[Path, ...] = ()
    config_dir: Path | None = None  # of `--config-dir`: what is beside it can be imported
    theirs: frozenset[str] = frozenset()  # keys of Lightning's modules

    def part(self, path: str, where: str, kind: type) -> Any:
        """A slot's own target, which has to be of its kind; its source is asked first."""
        where = f"{where}._target_"
        top = parts_of(path, where)[0]
        # A logger in dpframe.testing writes wherever it is told to.
        is_other = top in NEVER_WHOLE - {"dpframe"} or _is_within(path, "dpframe.testing")
        if not is_other and top != "dpframe":
            see_own_folders(top, self.config_dir)
            self._refuse_closed(path, where)
            if not self._names(path):
                refuse_unsaid(path, where, kind)
        if is_other or not self._makes(target := locate(path, where), kind):
            raise not_a_maker(f"{where}={path}", kind)
        return target

    def within(self, target: Any) -> "Trust":
        """Adds the package of a part, whose own code could call anything in it."""
        name = name_of(target)
        if name.split(".")[0] in NEVER_WHOLE | set(LIGHTNING):
            return self
        return replace(self, packages=self.packages | {_package_of(name)})

    def nested(self, path: str, where: str) -> Any:
        """What a node inside a part calls. A name from elsewhere is refused without an import."""
        if path in known():
            return known()[path]
        if where in self.theirs:
            return self._their(path, where)
        where = f"{where}._target_"
        parts = parts_of(path, where)
        if not any(_is_within(path, name) for name in (*self.packages, "dpframe")):
            near = nearest(path, known(), cutoff=0.9)
            if not near and spec_of(parts[0]) is None:
                raise no_module(path, where)
            raise _refusal(path, path, where, hint=f"did you mean {near}?" if near else "")
        see_own_folders(parts[0], self.config_dir)
        self._refuse_closed(path, where)
        target = locate(path, where)
        if path not in self.packages and not self.allows(target):
            raise _refusal(path, name_of(target), where)
        return target

    def _their(self, path: str, where: str) -> Any:
        """A class below Lightning's, or a function that is annotated with one: as a slot's own."""
        kind = THEIRS[where][1]
        where = f"{where}._target_"
        top = parts_of(path, where)[0]
        if not any(map(spec_of, LIGHTNING)):
            raise UserError(f"{where}={path} needs lightning; pip install 'dpframe[lightning]'")
        if top not in LIGHTNING and not (top in NEVER_WHOLE or self._names(path)):
            see_own_folders(top, self.config_dir)
            self._refuse_closed(path, where)
            refuse_unsaid(path, where, kind)
        if top in NEVER_WHOLE or not _is_theirs(_made_by(target := locate(path, where)), kind):
            raise not_a_maker(f"{where}={path}", kind)
        return target

    def refuse_returned(self, value: Any, path: str, where: str) -> None:
        """A node may give another one a function, a class or a module only if it may be called."""
        is_code = isinstance(value, type | types.ModuleType | functools.partial)
        is_code |= inspect.isroutine(value) or "__wrapped__" in getattr(value, "__dict__", ())
        if is_code and not self.allows(value):
            raise _refusal(f"{path}(…)", name_of(value), f"{where}._target_")

    def allows(self, target: Any) -> bool:
        """Judges a target by where it is defined, through every wrapper and partial."""
        if isinstance(target, functools.partial):
            return self.allows(target.func)
        name = name_of(target)
        if name in _known_names() or name.partition(".<locals>")[0] in _known_names():
            return True
        if not (self._names(name) or _is_ours(target)):
            return False
        wrapped = None if isinstance(target, type) else getattr(target, "__wrapped__", None)
        return wrapped is None or self.allows(wrapped)

    def _makes(self, target: Any, kind: type) -> bool:
        """A class below `kind`, or a function that is annotated with one, or vouched for."""
        if isinstance(target, type):
            return issubclass(target, kind)
        made = _made_by(target)
        return (made is not None and issubclass(made, kind)) or self._names(name_of(target))

    def _names(self, name: str) -> bool:
        return any(_is_within(name, package) for package in self.packages)

    def _refuse_closed(self, path: str, where: str) -> None:
        if not self.closed or any(_is_within(path, name) for name in self.typed):
            return
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            spec = spec_of(".".join(parts[:length]))
            files = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            for file in map(Path, filter(None, files)):
                places = (file.absolute(), file.resolve())  # it may be a link, or behind one
                if any(place.is_relative_to(folder) for place in places for folder in self.closed):
                    raise UserError(
                        f"{where}={path} is in {file}, beside what this run starts from; if you "
                        f"know what it does, add trusted_modules=[{parts[0]}] to the command"
                    )


NOBODY = Trust()


def _made_by(target: Any) -> type | None:
    """The class itself, or what a function's annotation says that it returns."""
    if isinstance(target, type):
        return target
    try:
        returned = get_type_hints(target).get("return")
    except Exception:  # annotations that can't be resolved say nothing
        return None
    is_function = inspect.isfunction(target) or inspect.ismethod(target)
    return returned if is_function and isinstance(returned, type) else None


def _is_theirs(made: type | None, kind: str) -> bool:
    parents = () if made is None else made.__mro__
    return any(p.__name__ == kind and p.__module__.split(".")[0] in LIGHTNING for p in parents)


@functools.cache
def known() -> dict[str, Any]:
    """What of PyTorch and Python any config may call, by all its public names."""
    found: dict[str, Any] = {}
    kinds = {nn: nn.Module, optim: optim.Optimizer, lr_scheduler: lr_scheduler.LRScheduler}
    for module, kind in kinds.items():
        for name, value in vars(module).items():
            is_class = isinstance(value, type) and issubclass(value, kind)
            if is_class and name[0] != "_" and name not in NOT_LAYERS:
                paths = f"{module.__name__}.{name}", name_of(value)
                found |= {path: value for path in paths if "._" not in path}
    for path, names in FUNCTIONS.items():
        there = vars(importlib.import_module(path))  # an older torch lacks some
        found |= {f"{path}.{name}": there[name] for name in names.split() if name in there}
    for layer in (nn.Embedding, nn.EmbeddingBag):
        found[f"torch.nn.{layer.__name__}.from_pretrained"] = layer.from_pretrained
    return found


def name_of(target: Any) -> str:
    """The module and the name that something is defined by: mine.run may be posix.system."""
    if isinstance(target, types.ModuleType):
        return target.__name__
    module = getattr(target, "__module__", None) or "builtins"  # a method that is written in C
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{module}.{name}"


@functools.cache
def _known_names() -> frozenset[str]:
    return frozenset(map(name_of, known().values()))


def _closed(job: Composed) -> tuple[Path, ...]:
    """The folder that a run starts from may be a stranger's: it holds data, not trusted code."""
    if job.start is None:
        return ()
    folder = job.start.parent
    inside = folder.resolve()  # `checkpoints` may be a link, on either side of it
    closed = [place.parent.resolve() for place in (folder, inside) if place.name == "checkpoints"]
    if not Path.cwd().is_relative_to(inside):
        closed.append(inside)
    return tuple(closed)


def _is_ours(target: Any) -> bool:
    """A recipe's functions, and classes that are parts; not the command, say."""
    name = name_of(target)
    if not _is_within(name, "dpframe") or _is_within(name, "dpframe.testing") or "._" in name:
        return False
    if inspect.isfunction(target):
        return _is_within(name, "dpframe.recipes") and "." not in target.__qualname__
    return isinstance(target, type) and issubclass(target, OURS)


def _refusal(path: str, name: str, where: str, hint: str = "") -> UserError:
    what = f"{where}={path}" if path == name else f"{where}={path} is {name}, which"
    key = name if name.split(".")[0] in NEVER_WHOLE else _package_of(name)
    hint = hint or f"if you know what it does, add trusted_modules=[{key}] to the command"
    return UserError(f"{what} is not one of the names that a config may call; {hint}")


def _package_of(name: str) -> str:
    """The top package; of a namespace that several packages share, the one below it."""
    top, *rest = name.split(".")
    folders = getattr(sys.modules.get(top), "__path__", [])
    is_shared = getattr(sys.modules.get(top), "__file__", None) is None and len(folders) > 1
    return f"{top}.{rest[0]}" if is_shared and rest else top


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
