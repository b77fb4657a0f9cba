"""The simplest logger: it writes nothing. Override what differs."""

Scalar = float | int | str | bool


class Logger:
    """The Trainer calls these on the main process alone, in this order; none may touch the GPU.

    One that raises, e.g. on a full disk, is one warning: the logger is called no more, and training
    goes on.
    """

    needs_directory = False  # True: it is not opened without a `run_dir`

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        """A run begins: `config` is its resolved YAML, `hparams` its numbers in one flat dict.

        `purge_step` is None, or the first step that a resumed run writes again.
        """

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        """All that was measured at one step, at once."""

    def flush(self) -> None:
        """A few times a second, and before a checkpoint: what was logged survives the process."""

    def dashboard(self, run_dir: str) -> str:
        """The command that shows what was logged, for the banner; '' if there is none."""
        return ""

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        """The run is over, with its final metrics."""
