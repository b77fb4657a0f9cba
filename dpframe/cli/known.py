"""What of PyTorch and Python any config may call: layers, optimisers, schedulers, some functions.

A list of what is known, as names in torch's own modules add up to `os.system`. Whatever it is
given, nothing on it imports or calls what a text names, sets any attribute or writes a file.
"""

import builtins
import collections
import inspect
import sys
from functools import cache
from typing import Any

BUILTINS = ("dict", "list", "tuple", "set", "frozenset", "range", "slice")
# These set attributes by any name, or hand any calls on.
NOT_LAYERS = ("Container", "ParameterDict")
FUNCTIONS = {
    "torch": "abs cos exp log_softmax prelu relu rrelu selu celu sigmoid sin softmax tanh",
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
    "torch.nn.init": """
        calculate_gain constant_ dirac_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_
        orthogonal_ sparse_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_
    """,
    "torch.nn.utils.parametrizations": "orthogonal spectral_norm weight_norm",
    "torch.optim.swa_utils": """
        AveragedModel SWALR get_ema_avg_fn get_ema_multi_avg_fn get_swa_avg_fn get_swa_multi_avg_fn
    """,
}


@cache
def names() -> dict[str, Any]:
    """By every public name: torch.nn.Linear is torch.nn.modules.linear.Linear, too."""
    from torch import nn, optim
    from torch.nn.utils import parametrizations  # noqa: F401  so that sys.modules has them
    from torch.optim import lr_scheduler, swa_utils  # noqa: F401

    found: dict[str, Any] = _classes(nn, nn.Module, but=NOT_LAYERS)
    found |= _classes(optim, optim.Optimizer)
    found |= _classes(lr_scheduler, lr_scheduler.LRScheduler)
    for module, listed in FUNCTIONS.items():
        there = {name: getattr(sys.modules[module], name, None) for name in listed.split()}
        found |= {f"{module}.{name}": made for name, made in there.items() if made is not None}
    for layer in (nn.Embedding, nn.EmbeddingBag):
        found[f"torch.nn.{layer.__name__}.from_pretrained"] = layer.from_pretrained
    found |= {f"builtins.{name}": getattr(builtins, name) for name in BUILTINS}
    return found | {"collections.OrderedDict": collections.OrderedDict}


def has(target: Any) -> bool:
    """Whether this very object is on the list, or was made by a function that is."""
    if inspect.ismethod(target):
        return any(target == made for made in names().values() if inspect.ismethod(made))
    if id(target) in _identities():
        return True
    outer, local, _ = str(getattr(target, "__qualname__", "")).partition(".<locals>.")
    is_local = inspect.isfunction(target) and bool(local)
    return is_local and f"{target.__module__}.{outer}" in names()


def below(path: str) -> list[str]:
    """The names that a path on the list may go on with."""
    start = f"{path}."
    return sorted(
        {name.removeprefix(start).split(".")[0] for name in names() if name.startswith(start)}
    )


@cache
def _identities() -> frozenset[int]:
    return frozenset(map(id, names().values()))


def _classes(module: Any, kind: type, but: tuple[str, ...] = ()) -> dict[str, type]:
    found = {}
    for name, made in vars(module).items():
        is_one = isinstance(made, type) and issubclass(made, kind)
        if is_one and not name.startswith("_") and name not in but:
            found[f"{module.__name__}.{name}"] = made
            real = f"{made.__module__}.{made.__qualname__}"
            if not any(part.startswith("_") for part in real.split(".")):
                found[real] = made
    return found
