"""What a verification found: a table with a line a check, and the cause of each failure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

SHOWN = 6  # numbers of a long list
COLUMNS = ("check", "what was compared", "largest difference", "result")


@dataclass(frozen=True)
class Finding:
    """`passed` is None where there was nothing to look at."""

    check: str
    compared: str
    measured: str
    passed: bool | None
    cause: str = ""

    @property
    def result(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


@dataclass
class Report:
    title: str
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    details: str = ""  # the traceback of a job that failed

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.passed is False]

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        rows = [COLUMNS, *((f.check, f.compared, f.measured, f.result) for f in self.findings)]
        first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [f"{a:<{first}}  {b:<{second}}  {c:>{third}}  {d}" for a, b, c, d in rows]
        lines = [self.title, "", *table, ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAIL {finding.check}: {finding.cause}" for finding in self.failed]
        lines += [self.details] if self.details else []
        looked_at = [finding for finding in self.findings if finding.passed is not None]
        passed = len(looked_at) - len(self.failed)
        return "\n".join([*lines, f"{passed} of {len(looked_at)} checks passed"])


def counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shown(numbers: Iterable[int], most: int = SHOWN) -> str:
    kept = list(numbers)
    return " ".join(map(str, kept[:most])) + (" …" if len(kept) > most else "")
