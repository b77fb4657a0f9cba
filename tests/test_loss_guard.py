"""A loss that is no number never reaches the weights, and says where it came from."""

import logging
import math
from functools import partial

import pytest
import torch
from forked import on
from recorded import Recorder
from small import Hooks, Rows, Small, fitted, is_same
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from dpframe import checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.data import permutation
from dpframe.errors import Failure, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

BAD_ROW = 11


class Bad(Rows):
    """One row is not a number, or is infinite."""

    def __init__(self, value: float = math.nan, **given) -> None:
        super().__init__(**given)
        x, y = self.train.tensors
        self.train = TensorDataset(x, y.index_fill(0, torch.tensor([BAD_ROW]), value))


def met_in(epoch: int, *, shuffle: bool) -> tuple[int, str]:
    """The step of the epoch that reads the bad row, and the rows of its batch."""
    order = permutation(20, seed=0, epoch=epoch) if shuffle else torch.arange(20)
    step = int((order == BAD_ROW).nonzero()) // 4
    return step + 1, " ".join(map(str, order[4 * step : 4 * step + 4].tolist()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_stops_before_the_update_and_names_step_and_rows(value, shuffle):
    step, rows = met_in(0, shuffle=shuffle)
    weights = []
    hooks = Hooks(on_step_end=lambda t: weights.append(t.task.net[0].weight.detach().clone()))
    stopped = []
    hooks.on_exception = lambda trainer, error: stopped.append(trainer)
    with pytest.raises(Failure) as caught:
        fitted(data=Bad(value, shuffle=shuffle), callbacks=[hooks])
    assert str(caught.value).startswith(f"step {step}: the loss is {value}, rows {rows}; training")
    assert len(weights) == stopped[0].global_step == step - 1
    assert torch.equal(stopped[0].task.net[0].weight, weights[-1])


def test_accumulation_names_the_micro_batch(tmp_path):
    at, rows = met_in(0, shuffle=True)
    with pytest.raises(Failure, match=f"^step {-(-at // 3)}: the loss is nan, rows {rows};"):
        fitted(data=Bad(), accumulate=3)


def test_data_parallel_names_the_replica():
    step, rows = met_in(0, shuffle=False)
    replica = BAD_ROW % 4
    with pytest.raises(Failure, match=f"the loss is nan on replica {replica}, rows {BAD_ROW};"):
        fitted(data=Bad(shuffle=False), strategy=DataParallel(4, "cpu"))


def test_the_last_good_checkpoint_stays(tmp_path):
    step, _ = met_in(0, shuffle=True)
    with pytest.raises(Failure, match="every checkpoint is as it was"):
        fitted(data=Bad(), callbacks=[Checkpoint(every_n_steps=1)], directory=tmp_path)
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    assert state["progress"]["global_step"] == step - 1


@pytest.mark.parametrize("every", [{"log_every": 3}, {"validate_every_steps": 5}, {}])
def test_losses_that_are_read_late_are_still_named_and_never_saved(tmp_path, monkeypatch, every):
    """As on a GPU, where a look at each loss would wait for it."""
    monkeypatch.setattr("dpframe.trainer.outputs.READ_AT_ONCE", set())
    step, rows = met_in(0, shuffle=True)
    keeper = Checkpoint(every_n_steps=2)
    with pytest.raises(Failure, match=f"^step {step}: the loss is nan, rows {rows};") as caught:
        fitted(data=Bad(), callbacks=[keeper], directory=tmp_path, **every)
    read_after = step + step % 2  # for the checkpoint
    then = f"every checkpoint is from before that loss: go on with resume={tmp_path};"
    assert f"and training stopped after step {read_after}; {then}" in str(caught.value)
    for path in (tmp_path / "checkpoints").iterdir():
        assert checkpoint.load(path)["progress"]["global_step"] < step


def test_skip_leaves_out_the_step_and_its_numbers(caplog):
    with caplog.at_level(logging.WARNING, "dpframe"):
        one = fitted(data=Bad(), on_nonfinite="skip")
    assert (one.global_step, one.progress.skipped_steps, one.progress.rows_seen) == (10, 2, 40)
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        f"step {met_in(0, shuffle=True)[0]}",
        f"step {5 + met_in(1, shuffle=True)[0]}",
    ]
    by_hand = trained_by_hand(leave_out=True)
    assert is_same(one.task.net.state_dict(), by_hand)
    assert not is_same(by_hand, trained_by_hand(leave_out=False))
    assert math.isfinite(one.metrics["train/loss"])


def trained_by_hand(*, leave_out: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net, rows = Small().net, Bad(math.nan if leave_out else 0.0).train
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        for batch in permutation(20, seed=0, epoch=epoch).split(4):
            x, y = rows[batch]
            loss = (net(x)[:, 0] - y).square().mean()
            if torch.isfinite(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return net.state_dict()


def test_skipping_within_an_accumulated_step_leaves_out_all_of_it():
    one = fitted(data=Bad(), accumulate=5, on_nonfinite="skip", max_epochs=1)
    assert (one.global_step, one.progress.skipped_steps) == (1, 1)
    torch.manual_seed(0)
    assert is_same(one.task.state_dict(), Small().state_dict())


def test_ddp_refuses_to_skip_within_an_accumulated_step_that_may_leave_out_parameters():
    strategy = DDP(find_unused_parameters=True)
    strategy.is_set_up = True  # it is refused before there is anything to close
    with pytest.raises(UserError) as caught:
        fitted(data=Bad(), strategy=strategy, accumulate=5, on_nonfinite="skip")
    assert str(caught.value) == (
        "trainer.on_nonfinite=skip with a step of 5 backwards or more: under "
        "strategy.find_unused_parameters=true torch still expects the gradients of those that were "
        "left out; use trainer.accumulate=1 trainer.micro_batch=null, or strategy=data_parallel"
    )


class Rooted(Small):
    """As boston: its summary takes the root of a mean, which has to be there."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "rmse": math.sqrt(means["loss"])}


def test_an_epoch_of_steps_that_are_all_left_out_has_no_numbers_of_its_own():
    data = Bad()
    x, y = data.train.tensors
    data.train = TensorDataset(x, torch.full_like(y, math.nan))
    kept = [EarlyStopping("train/loss", patience=2)]
    given = {"data": data, "on_nonfinite": "skip", "log_every": 1}
    task = Rooted(scheduler=partial(ReduceLROnPlateau, patience=5))
    one = fitted(task, plateau_monitor="train/loss", callbacks=kept, **given)
    assert one.update.scheduler.num_bad_epochs == 2  # an epoch of NaN is no better
    assert one.progress.skipped_steps == one.global_step == 10
    assert one.stop_reason == "train/loss has not got better than NaN for 2 epochs"
    assert not [name for name in one.metrics if name.startswith("train/")]


def test_a_step_that_is_left_out_can_be_logged():
    one = fitted(Rooted(), data=Bad(), on_nonfinite="skip", log_every=1)
    assert one.progress.skipped_steps == 2 and math.isfinite(one.metrics["train/rmse"])


def test_a_logged_step_that_is_left_out_has_no_norm_of_an_earlier_gradient():
    recorder = Recorder()
    fitted(data=Bad(), on_nonfinite="skip", log_every=1, clip_norm=1.0, loggers=[recorder])
    left_out = {met_in(0, shuffle=True)[0], 5 + met_in(1, shuffle=True)[0]}
    steps = {at for at, numbers in recorder.log_ if "step/grad_norm" in numbers}
    assert steps == {*range(1, 11)} - left_out


def fit_in_ranks(strategy: DDP, folder: str, on_nonfinite: str) -> tuple[int, int]:
    one = fitted(
        data=Bad(shuffle=False),
        strategy=strategy,
        callbacks=[Checkpoint(every_n_steps=1)],
        directory=folder,
        on_nonfinite=on_nonfinite,
    )
    return one.global_step, one.progress.skipped_steps


def test_a_rank_names_itself_and_no_rank_updates_its_weights(tmp_path):
    step, _ = met_in(0, shuffle=False)
    rank = (BAD_ROW % 4) // 2
    rows = f"{BAD_ROW - 1} {BAD_ROW}"
    said = f"^step {step}: the loss is nan on rank {rank}, rows {rows};"
    with pytest.raises(Failure, match=said):
        on(DDP(2, "cpu"), fit_in_ranks, str(tmp_path), "stop")
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    assert state["progress"]["global_step"] == step - 1


def test_ranks_skip_the_same_steps(tmp_path):
    assert on(DDP(2, "cpu"), fit_in_ranks, str(tmp_path), "skip") == (10, 2)
    alone = fitted(data=Bad(shuffle=False), on_nonfinite="skip").task.state_dict()
    together = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")["task"]
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight)
