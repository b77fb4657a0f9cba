"""The history of a run in memory: a list of rows, which pandas.DataFrame takes as it is."""

from dpframe.loggers.base import Logger


class History(Logger):
    """A row for each step at which something was logged, with its `step` and the numbers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1].update(scalars)
