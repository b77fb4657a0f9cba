"""What a plan measures, on a network whose memory is known."""

from functools import partial

import pytest
import torch
from dpframe_plan.measure import measure
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dpframe import DataModule, Task, TrainerSettings, UserError

SGD = partial(torch.optim.SGD, lr=0.05)
Adam = partial(torch.optim.Adam, lr=0.01)


class Small(Task):
    def __init__(self, optimizer=SGD, scheduler=None):
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        super().__init__(net, optimizer, scheduler)

    def training_step(self, batch):
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


class Rows(DataModule):
    def __init__(self, rows=20):
        super().__init__(batch_size=4)
        self.rows = rows

    def train_dataset(self):
        x = torch.linspace(-1, 1, 3 * self.rows).reshape(-1, 3)
        return TensorDataset(x, x.sum(dim=1))


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(3), torch.ones(())


def measured(make=Small, data=None, *, steps=1, **settings):
    kept = TrainerSettings(**{"max_epochs": 1, "threads": 1, **settings})
    return measure(make(), data or Rows(), kept, accelerator="cpu", seed=0, steps=steps)


def test_the_memory_of_a_known_network_is_exact():
    """3-8-1 with Adam: float32, and four batches of 4 rows and one of 2."""
    small_plan = measured(lambda: Small(Adam), Rows(rows=18))
    costs = small_plan.costs
    assert costs.parameters == costs.gradients == (3 * 8 + 8 + 8 + 1) * 4
    assert costs.optimizer == 2 * costs.parameters + 4 * 4  # two moments, a count a tensor
    assert costs.buffers == 0
    # x and y, the ReLU's output, which the second layer shares, and the error that is squared.
    assert costs.activations.at(4) == pytest.approx(4 * (3 + 1 + 8 + 1) * 4)
    assert costs.activations.at(2) == pytest.approx(2 * (3 + 1 + 8 + 1) * 4)
    assert sum(bucket.size for bucket in costs.buckets) == costs.gradients
    assert small_plan.steps == {(4,): 4, (2,): 1}


def test_gradients_arrive_from_the_last_layer_to_the_first():
    class Deep(Small):
        def __init__(self):
            super().__init__(partial(torch.optim.SGD, lr=1e-5))
            self.net = nn.Sequential(nn.Linear(3, 700), nn.Linear(700, 800), nn.Linear(800, 1))

    buckets = measured(Deep).costs.buckets
    assert [bucket.size for bucket in buckets] == [(800 + 1 + 700 * 800 + 800) * 4, 2800 * 4]
    assert 0 < buckets[0].ready <= buckets[1].ready <= 1


def test_steps_are_counted_with_accumulation_and_limits():
    assert measured(accumulate=2).steps == {(4, 4): 2, (4,): 1}
    assert measured(limit_train_batches=3).steps == {(4,): 3}


def test_a_schedule_that_ends_with_training_does_not_end_the_measurements():
    def once(optimizer, total_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)

    task = partial(Small, scheduler=once)
    assert measured(task, Rows(rows=4), steps=4, scheduler_every="step").steps == {(4,): 1}


def test_measuring_leaves_the_random_numbers_as_they_were():
    task = Small()
    task.net.insert(1, nn.Dropout(0.5))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measured(lambda: task)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_with_a_weight_reduces_one_number_more():
    class Weighted(Small):
        def training_step(self, batch):
            return super().training_step(batch) | {"weight": 3}

    assert measured().costs.small_reduces == 0
    assert measured(Weighted).costs.small_reduces == 1


def test_a_stream_of_unknown_length_is_refused():
    class Streamed(DataModule):
        def train_dataset(self):
            return Endless()

    with pytest.raises(UserError, match=r"Streamed\.train_dataset\(\) is a stream, so the steps"):
        measured(data=Streamed(batch_size=4))


def test_several_optimizers_are_refused():
    class Two(Small):
        def configure_optimizer(self):
            return {"a": Adam(self.net[0].parameters()), "b": Adam([self.net[2].bias])}

        def training_step(self, batch, turn):
            return super().training_step(batch)

    with pytest.raises(UserError, match="with one optimizer, and Two has several: a, b; try"):
        measured(Two)
