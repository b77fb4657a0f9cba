"""Draws a model for TensorBoard's GRAPHS tab: one forward pass, written down call by call.

Watching the calls costs about one forward pass and takes any batch and any output. The tracer of
torch's own TensorBoard writer takes neither, and its self-check alone imports 500 modules.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpframe.seeding import seeded


def draw(module: nn.Module, batch: Any) -> bytes:
    """A serialised GraphDef of `module(batch)` in eval mode; the random states stay as they are."""
    module.eval()
    sketch = _Sketch(module, batch)
    handles = sketch.watch(module)
    try:
        with seeded(0), warnings.catch_warnings(), sketch:
            warnings.simplefilter("ignore")
            output = module(batch)
    finally:
        for handle in handles:
            handle.remove()
    for path, tensor in _tensors(output, "output"):
        sketch.add(path, "Output", [tensor], [tensor])
    graph = GraphDef(node=sketch.nodes, versions=VersionDef(producer=22))
    return bytes(graph.SerializeToString())


class _Sketch(TorchFunctionMode):
    """Sees every torch call of the forward pass and adds a node where tensors come out."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__()
        self.nodes: list[NodeDef] = []
        self._scopes = _scopes(module)
        self._scope = [self._scopes[""]]
        self._named: dict[int, tuple[str, Tensor]] = {}  # by id: the tensor has to stay alive
        self._times_used: Counter[str] = Counter()
        for path, tensor in _tensors(batch, "input"):
            self.add(path, "Input", [], [tensor])
        for kind, tensors in (
            ("Parameter", module.named_parameters()),
            ("Buffer", module.named_buffers()),
        ):
            for path, tensor in tensors:
                scope, _, name = path.rpartition(".")
                self.add(f"{self._scopes[scope]}/{name}", kind, [], [tensor])

    def watch(self, module: nn.Module) -> list[Any]:
        """Follows which module is called; the hooks' handles."""

        def enter(scope: str) -> Callable[..., None]:
            return lambda *_: self._scope.append(scope)

        def leave(*_: Any) -> None:
            self._scope.pop()

        handles: list[Any] = []
        for path, child in module.named_modules():
            if path:
                handles.append(child.register_forward_pre_hook(enter(self._scopes[path])))
                handles.append(child.register_forward_hook(leave))
        return handles

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        outputs = [tensor for _, tensor in _tensors(output)]
        if outputs:
            sources = [tensor for _, tensor in _tensors((args, kwargs))]
            self.add(f"{self._scope[-1]}/{_op(func)}", _op(func), sources, outputs)
        return output

    def add(self, name: str, op: str, sources: list[Tensor], outputs: list[Tensor]) -> None:
        count = self._times_used[name]
        self._times_used[name] += 1
        name = f"{name}_{count}" if count else name
        inputs = [self._named[id(t)][0] for t in sources if id(t) in self._named]
        shapes = AttrValue.ListValue(shape=[_shape(tensor) for tensor in outputs])
        attributes = {"_output_shapes": AttrValue(list=shapes)}
        self.nodes.append(NodeDef(name=name, op=op, input=inputs, attr=attributes))
        for index, tensor in enumerate(outputs):
            self._named[id(tensor)] = (f"{name}:{index}" if index else name), tensor


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
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{path}/{key}")


def _op(func: Any) -> str:
    """'linear', 'add', and 'T' for the getter of Tensor.T."""
    name: str = func.__name__
    if name == "__get__":
        name = func.__self__.__name__
    return name.strip("_")


def _shape(tensor: Tensor) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in tensor.shape])
