"""Each fault of faults/ can be planted: whoever moves or changes the code takes the fault along."""

import ast
import shlex
from collections import Counter

import faults
import pytest

KNOWN = faults.known()


@pytest.mark.parametrize("fault", KNOWN, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_where_it_is_planted_and_tests_that_should_notice(fault):
    found = faults.places(fault)
    assert len(found) == 1, f"put the text into faults.toml as it is now: {fault.old!r}"
    planted = found[0].read_text().replace(fault.old, fault.new)
    ast.parse(planted)  # what is no Python would be noticed by every test
    files = [word for word in shlex.split(fault.tests) if word.endswith(".py")]
    assert files and all((faults.ROOT / file).is_file() for file in files)


def test_there_are_fifteen_faults_of_each_room_and_none_twice():
    rooms = Counter(fault.room for fault in KNOWN)
    assert rooms.keys() == {"trainer", "strategies", "checkpoint", "launch"}
    assert min(rooms.values()) >= 15
    assert Counter(fault.name for fault in KNOWN).most_common(1)[0][1] == 1
    assert Counter(fault.old for fault in KNOWN).most_common(1)[0][1] == 1
