"""Means over rows: exact, whatever the batches and replicas, and over weights where given."""

import math
from typing import Any

import pytest
import torch

from dpframe import UserError, metrics
from dpframe.metrics import Means, Weighed, fraction
from dpframe.trainer.outputs import prefixed

SQUARES = [float(n * n) for n in range(10)]


def means() -> Means:
    return Means(lambda tensor: tensor, lambda names: names)


def measured(rows: list[float], **more: Any) -> tuple[int, dict[str, Any]]:
    return len(rows), {"loss": torch.tensor(rows).mean(), **more}


@pytest.mark.parametrize("cuts", [[4, 8], [3], [1, 9], []])
def test_uneven_shares_give_the_mean_over_rows(cuts):
    one = means()
    for start, end in zip([0, *cuts], [*cuts, 10], strict=True):
        one.add([measured(SQUARES[start:end])])
    assert one.total() == {"loss": pytest.approx(28.5, rel=1e-7)}


def test_an_accuracy_is_in_the_widest_type_of_its_device(monkeypatch):
    right = torch.tensor([True, False, True])
    assert fraction(right).item() == 2 / 3
    monkeypatch.setattr(metrics, "has_float64", lambda device: False)  # as on Apple's MPS
    assert torch.equal(fraction(right), torch.tensor(2 / 3, dtype=torch.float32))


NAN, ONE = torch.tensor(math.nan), torch.tensor(1.0)


@pytest.mark.parametrize(
    "several, mean",
    [
        # The mean of the means of three replicas would be 35.8.
        ([measured(share) for share in (SQUARES[:4], SQUARES[4:8], SQUARES[8:])], {"loss": 28.5}),
        ([(2, {"loss": ONE, "weight": 6 * ONE}), (8, {"loss": 5 * ONE, "weight": 2})], {"loss": 2}),
        ([(2, {"loss": NAN, "weight": 0 * ONE})], {}),
        ([(2, {"loss": NAN, "weight": 0 * ONE}), (2, {"loss": 3, "weight": 2})], {"loss": 3}),
        ([(1, {"loss": 1.0}), (3, {"loss": 5.0, "mae": 2.0})], {"loss": 4, "mae": 2}),
        # Sums are in 64 bits.
        (
            [(1, {"loss": n * ONE, "weight": ONE}) for n in (1e8, *[1] * 100)],
            {"loss": (1e8 + 100) / 101},
        ),
    ],
)
def test_a_mean_is_over_the_rows_or_the_weights_that_count(several, mean):
    together, apart = means(), means()
    together.add(several)
    for one in several:
        apart.add([one])
    assert together.total() == apart.total() == pytest.approx(mean, rel=1e-7, abs=0)


def test_a_window_is_since_the_last_window_and_the_total_is_all():
    one = means()
    one.add([measured([1.0, 1.0])])
    assert one.window() == {"loss": 1.0}
    one.add([measured([4.0])])
    assert one.window() == {"loss": 4.0}
    assert one.window() == {}
    assert one.total() == {"loss": 2.0}
    one.reset()
    assert one.total() == {}


PARTS = [
    [(3, {"loss": math.sin(n), "mae": 0.1 * n}), (2, {"loss": torch.tensor(0.7 + n) / 3})]
    for n in range(9)
]


@pytest.mark.parametrize("cut", range(9))
def test_a_sum_does_not_depend_on_when_it_was_looked_at_or_saved(cut):
    whole, first, second = means(), means(), means()
    looked = []
    for n, part in enumerate(PARTS):
        whole.add(part)
        later = first if n < cut else second
        if n == cut:
            first.total()
            second.load_state_dict([first.state_dict()])
        later.add(part)
        later.state_dict()
        if n % 4 == 2:
            looked.append((later.window(), whole.window()))
    assert all(one == other for one, other in looked)
    assert second.total() == whole.total()
    assert second.window() == whole.window()


def test_the_state_of_other_processes_is_added_up_in_the_main_one():
    parts = [means(), means(), means()]
    for number, part in enumerate(parts):
        part.add(PARTS[number])
    states = [part.state_dict() for part in parts]
    whole = means()
    for number in range(3):
        whole.add(PARTS[number])
    main, other = means(), means()
    main.load_state_dict(states, rank=0, world_size=2)
    other.load_state_dict(states, rank=1, world_size=2)
    assert main.total() == pytest.approx(whole.total(), rel=1e-12)
    assert other.total() == {}
    assert other.state_dict()["totals"].keys() == main.state_dict()["totals"].keys()


def test_the_names_of_all_processes_are_agreed_on_once():
    """Two processes, one of which measures a name that the other does not."""
    agreed: list[list[str]] = []

    def agree(names: list[str]) -> list[str]:
        agreed.append(names)
        return sorted({*names, "there"})

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        if len(tensor) == 1 + 2 * 2:  # loss and there: the other has there = 3, over one row
            other = torch.tensor([0.0, 0.0, 0.0, 3.0, 1.0], dtype=torch.float64)
            return tensor + other
        return tensor

    one = Means(reduce, agree)
    one.add([(1, {"loss": 7.0})])
    assert one.window() == {"loss": 7.0, "there": 3.0}
    one.add([(1, {"loss": 9.0})])
    assert one.window() == {"loss": 9.0, "there": 3.0}
    assert agreed == [["loss"]]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_name_that_one_process_alone_has_in_every_step_is_refused(steps):
    """The other process has as many steps, and no f1."""

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        told = steps > 1
        names = [[1.0, 1.0, told, told]] if len(tensor) == 5 else []
        names = [[0.0, 0.0, 0.0, told], [1.0, 1.0, told, told]] if len(tensor) == 9 else names
        return tensor + torch.tensor([0.0, *(n for each in names for n in each)])

    one = Means(reduce, lambda names: names)
    one.add([(1, {"loss": 7.0, "f1": 0.5})] * steps)
    if steps == 1:
        assert one.total() == {"f1": 0.5, "loss": 4.0}
        return
    with pytest.raises(UserError, match="1 of 2 processes return 'f1' in each step and the others"):
        one.total()


def test_several_are_summed_at_one_reduction_and_one_process_needs_none():
    def filled(make):
        one, other = make(), make()
        one.add([measured([1.0, 4.0], mae=0.25), measured([9.0])])
        other.add([measured([2.0, 2.5], accuracy=torch.tensor(0.5, dtype=torch.float64))])
        return one, other

    reduced: list[int] = []

    def counted() -> Means:
        return Means(lambda tensor: reduced.append(len(tensor)) or tensor, lambda names: names)

    one, other = filled(counted)
    totals = [one.total(other), other.total()]
    assert reduced == [2, 2 + 2 * 4 + 2 * 4]  # the names are news once
    assert totals == [
        {"loss": pytest.approx(14 / 3), "mae": 0.25},
        {"accuracy": 0.5, "loss": 2.25},
    ]
    alone, second = filled(lambda: Means(None, lambda names: names))
    assert [alone.total(second), second.total()] == totals
    assert [list(found) for found in totals] == [["loss", "mae"], ["accuracy", "loss"]]


@pytest.mark.parametrize(
    "several, line",
    [
        ([{"weight": 6.0}, {}], "a step returned a 'weight' for some batches and none for others;"),
        ([{"errors": torch.ones(3)}], "a step returned 'errors' with more than one number; return"),
    ],
)
def test_what_has_no_mean_is_refused(several, line):
    one = means()
    one.add([(2, {"loss": 1.0, **more}) for more in several])
    with pytest.raises(UserError, match=f"^{line}"):
        one.total()


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_outputs_of_the_same_names_are_read_together_to_the_same_bits(monkeypatch, is_weighted):
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for step in range(20):
        draws = torch.rand(8, generator=generator) * 3
        output = {f"n{at}": draws[at].to(KINDS[at % 5]) for at in range(7)}
        more = {"weight": (draws[7] * 2).long()} if is_weighted else {}  # 0 at times
        outputs.append((step % 3, {**output, **more}))

    def read() -> tuple[Any, ...]:
        made = Means(None, lambda names: names)
        made.add(outputs[:15])
        window = made.window()
        made.add(outputs[15:])
        return window, made.state_dict(), made.total(), made._times, made._outputs

    monkeypatch.setattr(metrics, "is_number", lambda value: pytest.fail("was looked at"))
    together = read()
    monkeypatch.undo()
    monkeypatch.setattr(metrics, "_alike", lambda kept: None)
    assert together == read() and len(together[0]) == 7


@pytest.mark.parametrize("turn", ["", "generator"])
def test_a_loss_in_parts_is_the_sum_of_their_means_over_what_each_counts(turn):
    """Whatever the batches are."""
    batches = [
        (2, Weighed({"loss": 3 * ONE, "mae": ONE, "a/b": 3 * ONE, "c": NAN}, {"a/b": 2, "c": 0})),
        (4, Weighed({"loss": 9 * ONE, "mae": ONE, "c": 9 * ONE}, {"c": torch.tensor(3)})),
        (1, Weighed({"loss": 7 * ONE, "mae": ONE, "a/b": 6 * ONE, "c": ONE}, {"a/b": 1, "c": 1})),
    ]
    one = means()
    for batch in batches:
        one.add(prefixed([batch], turn) if turn else [batch])
    start = turn and f"{turn}/"
    expected = {"a/b": 4.0, "c": 7.0, "loss": 11.0, "mae": 1.0}
    assert one.window() == {f"{start}{name}": value for name, value in expected.items()}
    restored = means()
    restored.load_state_dict([one.state_dict()])
    assert restored.total() == one.total()
    assert restored.total()[f"{start}loss"] == 11


def test_several_of_the_same_names_are_read_at_once_to_the_same_bits(monkeypatch):
    def filled() -> list[Means]:
        generator = torch.Generator().manual_seed(0)
        several = [Means(None, lambda names: names) for _ in range(4)]
        for place, one in enumerate(several):
            for rows in range(place + 1):  # 0 at times
                loss, mae = torch.rand(2, generator=generator)
                one.add([(rows, {"loss": loss, "mae": mae} if place < 3 else {"f1": loss})])
        return several

    def totals(several: list[Means]) -> list[Any]:
        return [(list(one.known().items()), one._times, one._outputs) for one in several]

    apart = filled()
    for one in apart:
        one.total()
    reads: list[int] = []
    alike = metrics._alike
    monkeypatch.setattr(metrics, "_alike", lambda kept: reads.append(len(kept)) or alike(kept))
    together = filled()
    assert together[0].total(*together[1:]) == {}
    assert reads == [1 + 2 + 3, 4]
    assert totals(together) == totals(apart)


def test_what_is_much_is_added_up_before_others_are_read(monkeypatch):
    one = means()
    for rows in range(1, 501):
        one.add([(rows, {"loss": ONE, "mae": ONE})])
    one.collect_many()
    assert len(one._kept) == 500
    one.add([(1, {"loss": ONE})])
    one.collect_many()
    assert one._kept == []


def test_so_many_numbers_are_kept_however_long_a_window_is(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_KEPT", 10)
    at_once, by_parts = means(), means()
    for step in range(100):
        by_parts.add([(2, {"loss": torch.tensor(step / 7), "mae": torch.tensor(0.1)})])
        assert len(by_parts._kept) <= 5
    monkeypatch.undo()
    for step in range(100):
        at_once.add([(2, {"loss": torch.tensor(step / 7), "mae": torch.tensor(0.1)})])
    assert len(at_once._kept) == 100 and by_parts.window() == at_once.window()
