"""What the processes of a command or a test have written to FAKECUDA_REPORT, and what is wrong."""

from collections import defaultdict
from collections.abc import Iterable

FACT = "@"  # begins a line that is wrong only together with others


def violations(text: str) -> list[str]:
    """Each once."""
    lines = dict.fromkeys(text.splitlines())
    told = [line for line in lines if not line.startswith(FACT)]
    return told + foreign_contexts(line for line in lines if line.startswith(FACT))


def foreign_contexts(facts: Iterable[str]) -> list[str]:
    """A process's own GPUs are those of its collectives; without any, those where it has made
    memory or a stream. A context on another one is a violation: it takes half a GiB there."""
    of: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for fact in facts:
        kind, process, gpu, *what = fact.removeprefix(FACT).split(maxsplit=3)
        of[process][kind][int(gpu)] = "".join(what)
    found = []
    for known in of.values():
        own = known["collective"] or known["use"]
        whose = f"in a process whose own GPUs are {' '.join(f'cuda:{gpu}' for gpu in sorted(own))}"
        for gpu, what in known["context"].items():
            if own and gpu not in own:
                found.append(f"CONTEXT: {what} makes one on cuda:{gpu}, {whose}")
    return list(dict.fromkeys(found))
