"""The hooks, as one annotated loop. Override what you need: the rest does nothing.

    on_fit_start
    for epoch:   on_epoch_start
        for step:   forward, backward, optimizer.step()   on_step_end
                    validation, every n steps             on_validation_end
        validation, every n epochs                        on_validation_end
        on_epoch_end
    on_fit_end / on_exception

Within a hook, callbacks run in the order of the config; those with `reads_metrics` come after them,
and those with `runs_last` last.
`on_validation_end`, `on_test_end` and `on_predict_end` also end the modes of those names.
Hooks run in every process; only the one where `trainer.strategy.is_main` may print and write.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dpframe.errors import UserError, suggestion

if TYPE_CHECKING:
    from dpframe.trainer import Predictions, Trainer


class Callback:
    reads_metrics = False  # True: after those that may add to them by `trainer.log`
    runs_last = False  # True: after all others, so that it sees what they decided
    needs_directory = False  # True: `fit` refuses to begin without `trainer.run.directory`

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Everything is built and placed; no step has been taken yet."""

    def on_epoch_start(self, trainer: "Trainer") -> None: ...

    def on_step_end(self, trainer: "Trainer") -> None:
        """`trainer.global_step` updates are done. The hot path: read no tensor here."""

    def on_validation_end(self, trainer: "Trainer") -> None:
        """`trainer.metrics` holds the new val/ numbers."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """`trainer.metrics` holds the epoch's train/ and val/ numbers."""

    def on_fit_end(self, trainer: "Trainer") -> None: ...

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None: ...

    def on_test_end(self, trainer: "Trainer") -> None: ...

    def on_predict_end(self, trainer: "Trainer", predictions: "Predictions") -> None:
        """On the main process alone: the others have no predictions."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: numbers, text, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def hooks_of(callbacks: Iterable[Callback]) -> dict[str, list[Callable[..., None]]]:
    """By hook, the methods of all callbacks; a misspelt hook is refused."""
    callbacks = list(callbacks)
    for kind in map(type, callbacks):
        for name in dir(kind):
            if name.startswith("on_") and name not in HOOKS and callable(getattr(kind, name)):
                raise UserError(
                    f"{kind.__name__}.{name} is no hook and would never be called; "
                    f"{suggestion(name, HOOKS)}"
                )
    return {name: [getattr(callback, name) for callback in callbacks] for name in HOOKS}
