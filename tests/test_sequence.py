"""Two ranks call hooks, collectives and generators in the order that is agreed: see sequence.py."""

from difflib import unified_diff

import pytest
import sequence
from recorded import once

of_case = once(sequence.of_case)


@pytest.mark.parametrize("name", sequence.CASES)
def test_hooks_collectives_and_draws_come_in_the_agreed_order(name):
    changed = []
    for rank, lines in enumerate(of_case(name)):
        path = sequence.path(name, rank)
        agreed = path.read_text().splitlines()
        changed += unified_diff(agreed, lines, path.name, "now", n=5, lineterm="")
    more = f"\n… and {len(changed) - 60} lines more" * (len(changed) > 60)
    assert not changed, (
        "if the new order is meant, `python tests/sequence.py` writes it down:\n"
        + "\n".join(changed[:60])
        + more
    )


@pytest.mark.parametrize("name", sequence.CASES)
def test_both_ranks_call_the_same_collectives(name):
    first, second = ([*map(called, lines)] for lines in of_case(name))
    assert list(filter(None, first)) == list(filter(None, second)) != []


def called(event: str) -> str:
    """Which collective, of which group; '' for other events. Only main gets what is gathered."""
    is_one = event.startswith(sequence.COLLECTIVE)
    return event.removeprefix(sequence.COLLECTIVE).partition(":")[0] if is_one else ""


def test_the_cases_have_all_kinds_of_events():
    events = "\n".join(path.read_text() for path in sequence.FOLDER.glob("*.txt"))
    missing = [hook for hook in sequence.HOOKS if f"All.{hook}" not in events]
    assert missing == []
    for kind in ("allreduce", "broadcast", "allgather", "reduce_scatter", "drawn: python", "turns"):
        assert kind in events, kind
    assert "resumed" in events
