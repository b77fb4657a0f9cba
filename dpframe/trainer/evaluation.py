"""Validation, test and prediction: every row once, whatever the strategy."""

from typing import Any

import torch

from dpframe import seeding
from dpframe.data import Loader
from dpframe.data.prefetch import prefetched
from dpframe.errors import Interrupted, UserError
from dpframe.heartbeat import beat
from dpframe.interruption import Interruption
from dpframe.metrics import Means
from dpframe.strategies.base import Strategy
from dpframe.task import Autocast, EvalStep, Task
from dpframe.trainer.feed import local_devices
from dpframe.trainer.lookout import Lookout
from dpframe.trainer.predictions import Predictions, by_rows, collected


class Evaluation:
    """One of the task's steps over a data set."""

    def __init__(
        self,
        task: Task,
        step: str,
        loader: Loader,
        strategy: Strategy,
        *,
        autocast: Autocast | None,
        limit_batches: int | None,
        interruption: Interruption | None = None,
    ) -> None:
        self.task = task
        self.step_name = step
        self.loader = loader
        self.read, self.to_device = prefetched(loader, strategy.to_device, local_devices(strategy))
        self.strategy = strategy
        self.limit_batches = limit_batches
        self.step = strategy.wrap(EvalStep(task, step, autocast), training=False)
        self.means = means_over(strategy)
        self.lookout = Lookout(strategy, interruption)

    @torch.no_grad()
    def means_of(self, kind: str, *others: Means) -> dict[str, float]:
        """The exact means over all rows, as `val/loss`, `val/mae` …; `others` are summed too."""
        self.means.reset()
        seen = 0
        for rows, measured in self._batches():
            self.means.add(measured)
            seen += rows
        total = self.means.total(*others)
        if not total:
            why = f"the weights of all {seen} rows add up to 0: there is no mean over them"
            raise UserError(f"{kind}: {why if seen else 'the data set gave no rows'}")
        return {f"{kind}/{name}": value for name, value in self.task.summarize(total).items()}

    @torch.no_grad()
    def predictions(self) -> Predictions | None:
        """Every row's output in the order of the data set, on the main process; None elsewhere."""
        name = f"{type(self.task).__name__}.{self.step_name}"
        here = [
            [by_rows(output, rows, f"{name} returned") for rows, output in part if rows]
            for _, part in self._batches()
        ]
        everywhere = self.strategy.gather(here)
        return collected(everywhere) if self.strategy.is_main else None

    def _batches(self) -> Any:
        module, to_device = self.step, self.to_device
        module.eval()
        look_at = self.lookout.begin(0)
        batches = self.loader.batches
        may_look = batches is None or batches >= look_at
        random_state = seeding.random_state() if may_look else {}
        for done, batch in enumerate(self.read(limit=self.limit_batches), 1):
            beat()
            yield batch.rows, module(to_device(batch.shares))
            if done >= look_at:
                look_at = self._look(done, random_state)

    def _look(self, done: int, random_state: dict[str, Any]) -> int:
        try:
            return self.lookout.look(done)[0]
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise


def means_over(strategy: Strategy) -> Means:
    def agree(names: list[str]) -> list[str]:
        return strategy.share(sorted(set().union(*strategy.gather(names))))

    return Means(strategy.reduce if strategy.world_size > 1 else None, agree)
