"""Settings as keywords of a Trainer, by their names."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypedDict

from dpframe.data.settings import DataSettings
from dpframe.errors import UserError, suggestion
from dpframe.trainer.settings import TrainerSettings

ELSEWHERE_NAMES = {  # of settings, in other frameworks
    **dict.fromkeys(("devices", "num_devices", "num_processes"), "gpus"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "max_epochs"),
    "mixed_precision": "precision",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "clip_norm"),
    "val_check_interval": "validate_every_steps",
    "num_sanity_val_steps": "sanity_batches",
    "log_every_n_steps": "log_every",
    "sync_batchnorm": "batch_norm",
}


class SettingsByName(TypedDict, total=False):
    """The keys of TrainerSettings, as keywords of a Trainer."""

    max_epochs: int | None
    max_steps: int | None
    max_seconds: float | None
    min_epochs: int | None
    min_steps: int | None
    gpus: Any
    accelerator: str
    precision: str | int
    matmul_precision: str | None
    accumulate: int
    micro_batch: int | None
    clip_norm: Any
    clip_value: Any
    scheduler_every: str
    plateau_monitor: str
    validate_every_epochs: int | float
    validate_every_steps: int | None
    sanity_batches: int
    share_check: str
    exact_layers: bool
    batch_norm: str | None
    dropout: str | None
    on_nonfinite: str
    max_skipped_steps: int | None
    log_every: int
    limit_train_batches: int | float | None
    limit_eval_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    logical_replicas: int | None
    deterministic: bool
    compile: Any
    checkpoint_activations: Any
    data_on_device: Any
    skip_dynamo_import: bool
    channels_last: bool
    cudnn_benchmark: bool | None
    profile: bool
    threads: int | None
    data_timeout_seconds: float
    max_restarts: int
    hang_seconds: float | None
    grace_seconds: float


def with_settings(
    settings: TrainerSettings, more: Mapping[str, Any], kind: type[Any]
) -> TrainerSettings:
    known = [field.name for field in fields(TrainerSettings)]
    of_data = [field.name for field in fields(DataSettings)]
    for name, value in more.items():
        if name not in known:
            meant = ELSEWHERE_NAMES.get(name)
            near = suggestion(name, inspect.signature(kind).parameters)
            near = f"did you mean {meant}?" if meant else near
            near = f"use DataSets(…, {name}={value!r})" if name in of_data else near
            raise UserError(f"Trainer: there is no setting {name}; {near}")
    return replace(settings, **more) if more else settings


def signature_with_settings(kind: type[Any]) -> inspect.Signature:
    """What completes a Trainer's arguments in a notebook: its own, and each of the settings."""
    own = inspect.signature(kind)
    settings = inspect.signature(TrainerSettings).parameters
    keywords = [
        settings[f.name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for f in fields(TrainerSettings)
    ]
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    return own.replace(parameters=[*named, *keywords])
