"""Draws a model for TensorBoard's GRAPHS tab: one forward pass, written down call by call.

Watching the calls costs about one forward pass and takes any batch and any output. The tracer that
torch's own TensorBoard writer uses takes neither, and its self-check alone imports 500 modules.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpframe.seeding import random_state, restore_random_state


def draw(module: nn.Module, batch: Any) -> bytes:
    """A serialised GraphDef of `module(batch)`; module and random states stay as they are."""
    sketch = _Sketch(module, batch)
    with _undisturbed(module), sketch.watching(module):
        output = module(batch)
    for path, tensor in _tensors(output, "output"):
        sketch.add(path, op="Output", sources=[tensor], outputs=[tensor])
    graph = GraphDef(node=sketch.nodes, versions=VersionDef(producer=22))
    return bytes(graph.SerializeToString())


class _Sketch(TorchFunctionMode):
    """Sees every torch call of the forward pass and adds a node where tensors come out."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__()
        self.nodes: list[NodeDef] = []
        self._scopes = _scopes(module)
        self._scope = [self._scopes[""]]
        self._name_of: dict[int, str] = {}  # by identity, so every tensor named here is kept alive
        self._kept: list[Tensor] = []
        self._times_used: Counter[str] = Counter()
        self._leaves = self._leaves_of(module, batch)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for path, child in module.named_modules():
                if path:
                    enter, leave = self._hooks(self._scopes[path])
                    stack.callback(child.register_forward_pre_hook(enter).remove)
                    stack.callback(child.register_forward_hook(leave).remove)
            stack.enter_context(self)
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        outputs = [tensor for _, tensor in _tensors(output)]
        if outputs:
            op = _op(func)
            sources = [tensor for _, tensor in _tensors((args, kwargs))]
            self.add(f"{self._scope[-1]}/{op}", op=op, sources=sources, outputs=outputs)
        return output

    def add(self, name: str, *, op: str, sources: list[Tensor], outputs: list[Tensor]) -> None:
        inputs = [source for tensor in sources if (source := self._source(tensor))]
        count = self._times_used[name]
        self._times_used[name] += 1
        name = f"{name}_{count}" if count else name
        self.nodes.append(
            NodeDef(name=name, op=op, input=inputs, attr={"_output_shapes": _shapes(outputs)})
        )
        for index, tensor in enumerate(outputs):
            self._name_of[id(tensor)] = f"{name}:{index}" if index else name
            self._kept.append(tensor)

    def _source(self, tensor: Tensor) -> str | None:
        """The node a tensor came from; parameters and inputs are drawn when first used."""
        if id(tensor) not in self._name_of and id(tensor) in self._leaves:
            name, op = self._leaves[id(tensor)]
            self.add(name, op=op, sources=[], outputs=[tensor])
        return self._name_of.get(id(tensor))

    def _leaves_of(self, module: nn.Module, batch: Any) -> dict[int, tuple[str, str]]:
        leaves = {id(tensor): (path, "Input") for path, tensor in _tensors(batch, "input")}
        for kind, named in (
            ("Parameter", module.named_parameters()),
            ("Buffer", module.named_buffers()),
        ):
            for path, tensor in named:
                scope, _, name = path.rpartition(".")
                leaves[id(tensor)] = (f"{self._scopes[scope]}/{name}", kind)
        return leaves

    def _hooks(self, scope: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: Any) -> None:
            self._scope.append(scope)

        def leave(*_: Any) -> None:
            self._scope.pop()

        return enter, leave


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """In eval mode and with warnings off; each submodule's mode and the random states come back."""
    modes = [(child, child.training) for child in module.modules()]
    before = random_state()
    try:
        module.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        restore_random_state(before)
        for child, mode in modes:
            child.training = mode


def _scopes(module: nn.Module) -> dict[str, str]:
    """'net.0' is drawn in 'Boston/Sequential[net]/Linear[0]'."""
    scopes: dict[str, str] = {}
    for path, child in module.named_modules():
        parent, _, attribute = path.rpartition(".")
        kind = type(child).__name__
        scopes[path] = f"{scopes[parent]}/{kind}[{attribute}]" if path else kind
    return scopes


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in nested tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | tuple | list):
        items: Iterable[tuple[Any, Any]] = (
            value.items() if isinstance(value, dict) else enumerate(value)
        )
        for key, item in items:
            yield from _tensors(item, f"{path}/{key}")


def _op(func: Any) -> str:
    """'linear', 'add', and 'T' for the getter of Tensor.T."""
    name: str = func.__name__
    if name == "__get__":
        name = func.__self__.__name__
    return name.strip("_")


def _shapes(tensors: list[Tensor]) -> AttrValue:
    shapes = [
        TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in tensor.shape])
        for tensor in tensors
    ]
    return AttrValue(list=AttrValue.ListValue(shape=shapes))
