"""Local SGD against ddp, and against its outer loop written by hand."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dpframe_localsgd.strategy import LocalSGD
from torch import Tensor, nn
from torch.optim import SGD, Adam

from dpframe import Callback, Strategy, Task, Trainer, TrainerSettings, UserError
from dpframe.plugin import Processes, allow_fork, checkpoint, permutation, split
from dpframe.recipes.boston import Boston, BostonData
from dpframe.strategies import DDP
from dpframe.testing import check_strategy

PLAIN = {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
BATCH = 50  # 404 rows are 8 batches and 4 rows: on three ranks 2, 2 and none


@pytest.fixture(autouse=True, scope="module")
def ranks_are_forked() -> None:
    """They can be while this process has no pool of threads; DDP's imports are made once."""
    torch.set_num_threads(1)
    torch.compiler.reset()
    allow_fork()


def network(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 16), *more, nn.ReLU(), nn.Linear(16, 1))


class Watch(Callback):
    """What each rank's weights are when somebody looks at them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_end(self, trainer: Trainer) -> None:
        self.seen.append(copied(trainer.task))

    on_fit_end = on_validation_end


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trainer_on(strategy: Strategy, optimizer: Any, net: Any = network, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    callbacks, data = settings.pop("callbacks", ()), settings.pop("data", BostonData)
    settings = {"max_epochs": 4, "precision": "64", **settings}
    return Trainer(
        Boston(net(), optimizer),
        data(batch_size=BATCH),
        strategy=strategy,
        settings=TrainerSettings(**settings),
        callbacks=callbacks,
    )


def fitted(strategy: Strategy, optimizer: Any, **settings: Any) -> tuple[Any, ...]:
    """In every rank. The main one's metrics and weights, and what each rank saw."""
    strategy.setup()
    try:
        watch = Watch()
        trainer = trainer_on(strategy, optimizer, callbacks=[watch], **settings)
        metrics = dict(trainer.fit())
        return (
            metrics,
            copied(trainer.task),
            strategy.collectives.gather(watch.seen),
            counts(strategy),
        )
    finally:
        strategy.close()


def counts(strategy: Any) -> tuple[int, ...]:
    names = ("rounds", "early_rounds", "sent_bytes", "ddp_bytes")
    return tuple(getattr(strategy, name, 0) for name in names)


def on_ranks(strategy: Processes, *args: Any, **settings: Any) -> tuple[Any, ...]:
    return strategy.launch(partial(fitted, **settings), strategy, *args)


def local(ranks: int, **settings: Any) -> LocalSGD:
    return LocalSGD(ranks, "cpu", **settings)


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(float((mine[n] - other[n]).abs().max() / other[n].abs().max()) for n in other)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["", "accumulate"])
def test_a_plain_average_after_every_update_equals_ddp(ranks, settings):
    optimizer = partial(SGD, lr=1e-3, momentum=0.9, weight_decay=0.01)
    mine, my_weights, *_ = on_ranks(local(ranks, **PLAIN), optimizer, **settings)
    theirs, their_weights, *_ = on_ranks(DDP(ranks, "cpu"), optimizer, **settings)
    assert mine.keys() == theirs.keys()
    assert all(mine[name] == pytest.approx(theirs[name], rel=1e-12) for name in theirs)
    assert apart(my_weights, their_weights) <= 1e-12


# These checks look at gradients, and each rank keeps its own.
LOCAL = ("metrics", "accumulation", "few_rows", "weighted", "gathered", "exact_layers")
LOCAL += ("gradient_sync",)


def test_a_plain_average_after_every_update_conforms_but_for_its_gradients():
    check_strategy(LocalSGD, gpus=2, accelerator="cpu", skip=LOCAL, **PLAIN)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overlap", [0, 1, 3, 4])
def test_rounds_equal_the_outer_loop_written_by_hand(ranks, overlap):
    outer = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "overlap_steps": overlap}
    strategy = local(ranks, inner_steps=4, **outer)
    _, weights, seen, _ = on_ranks(strategy, partial(Adam, lr=0.01))
    assert apart(weights, by_hand(ranks, epochs=4, inner_steps=4, overlap=overlap)) <= 1e-12
    for mine, *others in zip(*seen, strict=True):
        assert all(torch.equal(mine[name], other[name]) for other in others for name in mine)


def by_hand(ranks: int, *, epochs: int, inner_steps: int, overlap: int) -> dict[str, Tensor]:
    """All ranks in this process; the outer step is torch's own Nesterov."""
    data = BostonData(batch_size=BATCH)
    data.setup()
    x, y = (column.double() for column in data.train_dataset().tensors)
    torch.manual_seed(0)
    common = Boston(network(), None).double()
    replicas = [Boston(network(), None).double() for _ in range(ranks)]
    for replica in replicas:
        replica.load_state_dict(common.state_dict())
    inner = [Adam(replica.parameters(), lr=0.01) for replica in replicas]
    outer = SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for epoch in range(epochs):
        batches = permutation(len(x), seed=0, epoch=epoch).split(BATCH)
        sent: list[Any] = []  # the weights of each rank as they were
        for step, batch in enumerate(batches, start=1):
            for replica, optimizer, rows in zip(replicas, inner, split(batch, ranks), strict=True):
                # A share weighs by its rows: what all ranks lose together is the batch's mean.
                loss = (replica.net(x[rows]) - y[rows]).square().sum() * ranks / len(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            is_last = step == len(batches)  # each epoch ends in a validation
            if sent and (step % inner_steps == overlap % inner_steps or is_last):
                outer_step(common, replicas, sent.pop(), outer)
            if step % inner_steps == 0 or is_last:
                sent.append([copied(replica) for replica in replicas])
            if sent and (is_last or not overlap):
                outer_step(common, replicas, sent.pop(), outer)
    return copied(common)


def outer_step(common: Task, replicas: list[Task], sent: list[Any], outer: SGD) -> None:
    """What was sent is averaged; what was trained since is kept."""
    for name, weight in common.named_parameters():
        weight.grad = weight.detach() - torch.stack([each[name] for each in sent]).mean(dim=0)
    outer.step()
    with torch.no_grad():
        for replica, before in zip(replicas, sent, strict=True):
            for name, weight in replica.named_parameters():
                weight.add_(common.get_parameter(name) - before[name])


@pytest.mark.parametrize("overlap", [0, 2, 5])
def test_every_look_sees_the_same_weights_on_all_ranks(overlap):
    normalized = partial(network, nn.BatchNorm1d(16))
    steps = {"validate_every_steps": 4, "max_steps": 23, "max_epochs": None, "net": normalized}
    strategy = local(2, inner_steps=5, overlap_steps=overlap)
    _, _, seen, _ = on_ranks(strategy, partial(Adam, lr=0.01), **steps)
    assert [len(one) for one in seen] == [9, 9]  # after 4 8 9 12 16 18 20 23 updates, and fit
    for moment in zip(*seen, strict=True):
        assert all(torch.equal(moment[0][n], other[n]) for other in moment for n in moment[0])


class Unvalidated(BostonData):
    def val_dataset(self) -> None:
        return None


def test_training_without_validation_ends_on_common_weights():
    _, _, seen, sent = on_ranks(local(2, inner_steps=1000), partial(SGD, lr=1e-3), data=Unvalidated)
    assert sent[:2] == (1, 1)
    ((mine,), (other,)) = seen
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_counts_what_it_sends_beside_what_ddp_would():
    net = network()
    bytes_of_all = 8 * sum(p.numel() for p in net.parameters())
    settings = {"max_epochs": 4, "validate_every_epochs": 4}  # 36 updates
    *_, sent = on_ranks(local(2, inner_steps=10), partial(SGD, lr=1e-3), **settings)
    assert sent == (4, 1, 4 * bytes_of_all, 36 * bytes_of_all)


def frozen() -> nn.Sequential:
    net = network()
    net[0].requires_grad_(False)
    return net


def test_frozen_weights_stay_and_do_not_travel():
    *_, weights, _, sent = on_ranks(local(2, inner_steps=9), partial(SGD, lr=1e-3), net=frozen)
    torch.manual_seed(0)
    net = frozen()
    assert torch.equal(weights["net.0.weight"], net[0].weight.double())
    assert not torch.equal(weights["net.2.weight"], net[2].weight.double())
    assert sent[2] == 4 * 8 * 17


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(tmp_path, overlap):
    outer = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "overlap_steps": overlap}
    strategy = local(2, inner_steps=4, **outer)
    whole, resumed = strategy.launch(twice, strategy, tmp_path / "half.ckpt")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    on_cpu(tmp_path / "half.ckpt")


def twice(strategy: LocalSGD, file: Path) -> tuple[Any, ...]:
    """Six epochs at once; and again in two parts, with a checkpoint within an epoch."""
    strategy.setup()
    try:
        optimizer = partial(Adam, lr=0.01)
        whole = trainer_on(strategy, optimizer, max_epochs=6, callbacks=[Save(file, step=24)])
        whole.fit()
        rest = trainer_on(strategy, optimizer, max_epochs=6, callbacks=[Save(file, step=-1)])
        rest.fit(checkpoint.load(strategy.collectives.broadcast(str(file))))
        assert rest.global_step == whole.global_step
        return copied(whole.task), copied(rest.task)
    finally:
        strategy.close()


class Save(Callback):
    def __init__(self, file: Path, *, step: int) -> None:
        self.file = file
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step:
            state = trainer.state_dict()
            if trainer.strategy.is_main:
                checkpoint.save(state, self.file)


def on_cpu(file: Path) -> None:
    """Its checkpoints are anybody's: one process goes on with the weights and the moments."""
    trainer = trainer_on(Strategy(), partial(Adam, lr=0.01), max_epochs=3)
    trainer.fit(checkpoint.load(file))
    assert trainer.global_step == 27


def test_goes_on_from_a_checkpoint_of_one_process(tmp_path):
    save = Save(tmp_path / "one.ckpt", step=18)
    trainer_on(Strategy(), partial(Adam, lr=0.01), callbacks=[save]).fit()
    strategy = local(2, **PLAIN)
    assert strategy.launch(steps_after, strategy, save.file) == 36


def steps_after(strategy: LocalSGD, file: Path) -> int:
    strategy.setup()
    try:
        trainer = trainer_on(strategy, partial(Adam, lr=0.01))
        before = trainer_on(Strategy(), None)
        checkpoint.load_task(before.task, checkpoint.load(file))
        trainer.fit(checkpoint.load(file))
        moved = apart(copied(trainer.task), copied(before.task))
        assert 0 < moved < 1, moved  # it went on from there, and not from where it was built
        return trainer.global_step
    finally:
        strategy.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inner_steps": 0}, "inner_steps=0; use 1 or more"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate=0.0; use more than 0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0; use 0 or more, below 1"),
        ({"inner_steps": 4, "overlap_steps": 5}, "overlap_steps=5; use 0 or more, and at most"),
    ],
)
def test_a_setting_out_of_range_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        LocalSGD(**given)
