"""Each fault of faults/ can be planted: whoever moves or changes the code takes the fault along."""

import ast
import shlex
from collections import Counter

import faults
import pytest
from faults.mutation import CanNotPlant, mutated

KNOWN = faults.known()


@pytest.mark.parametrize("fault", KNOWN, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_where_it_is_planted_and_tests_that_should_notice(fault):
    path, text = faults.planted(fault)
    assert text != path.read_text()
    ast.parse(text)  # what is no Python would be noticed by every test
    words = [word.partition("::")[0] for word in shlex.split(fault.tests)]
    files = [word for word in words if word.endswith(".py")]
    assert files and all((faults.ROOT / file).is_file() for file in files)


def test_there_are_fifteen_faults_of_each_room_and_none_twice():
    rooms = Counter(fault.room for fault in KNOWN)
    assert rooms.pop("gpu")
    assert rooms.keys() == {"trainer", "strategies", "checkpoint", "launch"}
    assert min(rooms.values()) >= 15
    assert Counter(fault.name for fault in KNOWN).most_common(1)[0][1] == 1
    places = Counter((fault.at, fault.operator, fault.given) for fault in KNOWN)
    assert places.most_common(1)[0][1] == 1


WRITTEN = '''
class Step:
    def run(self, rows):
        """Two bytes: ß."""
        update = self.update
        if rows and not self.skips:  # a reason
            update.clear()
            self.means.add(rows / self.total,
                           is_last=bool(rows))
        return [name for name in self.names]
'''
OTHERWISE = '''
class Step:
    def other(self, rows): self.update.clear()

    def run(self, rows):
        """Two bytes: ß."""; done = rows / (self  # a reason
                                           .total)
        if (
            len(rows) > 0
            and not self.skips
        ): self.update.clear(); self.means.add(done, is_last=len(done))
        return [key for key in self.names]
'''
MUTATIONS = {
    ("drop", "clear"): "(None)",
    ("drop", "update.clear()"): "(None)",
    ("never", "skips"): "(False)",
    ("always", "skips"): "(True)",
    ("replace", "rows / A", "rows / (A + 1)"): "(rows / (self.total + 1))",
    ("replace", "[A for A in B]", "B[1:]"): "(self.names[1:])",
    ("argument", "is_last", "False"): "(False)",
}


@pytest.mark.parametrize("source", [WRITTEN, OTHERWISE], ids=["written", "written otherwise"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=" ".join)
def test_a_mutation_changes_one_place_however_the_code_is_written(mutation, source):
    instead = MUTATIONS[mutation]
    before, found, after = mutated(source, "Step.run", *mutation).partition(instead)
    assert found and source.startswith(before) and source.endswith(after)
    place = source[len(before) : len(source) - len(after)]
    assert ast.parse(f"({place})", mode="eval")  # one expression, and the whole of it


def test_a_function_that_returns_at_once_keeps_its_docstring():
    returned = WRITTEN.replace("update = self.update", "return 0")
    assert mutated(WRITTEN, "Step.run", "returns", "0") == returned


@pytest.mark.parametrize(
    "function, operator, given, said",
    [
        ("Step.go", "drop", "clear", "defines it 0 times"),
        ("Step.run", "drop", "reset", "has 0 places to drop `reset`, not one"),
        ("Step.run", "replace", "rows", "has 3 places to replace `rows`, not one"),
        ("Step.run", "swap", "rows", "has 0 places to swap `rows`, not one"),
    ],
)
def test_a_mutation_without_a_place_of_its_own_says_what_it_looked_for(
    function, operator, given, said
):
    with pytest.raises(CanNotPlant, match=f"^{said}$"):
        mutated(WRITTEN, function, operator, given)


def test_a_fault_that_has_lost_its_module_names_itself_in_one_line(tmp_path):
    line = "at trainer.loop:Trainer._seed: is no module; faults.toml follows the code"
    with pytest.raises(CanNotPlant) as refused:
        faults.planted(KNOWN[0], tmp_path)
    assert str(refused.value) == f"{KNOWN[0].name}: {line}"
