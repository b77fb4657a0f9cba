"""What a verification found: a table with a line a check, and the cause of each fail in words."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5
SHOWN = 6  # numbers of a long list


class Found(NamedTuple):
    """Nothing is wrong where there is no cause."""

    compared: str
    measured: str
    cause: str = ""
    is_void: bool = False  # there was nothing to look at


def counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shown(numbers: Iterable[int], most: int = SHOWN) -> str:
    kept = list(numbers)
    return " ".join(map(str, kept[:most])) + (" …" if len(kept) > most else "")


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
    details: str = ""  # of a run that broke off

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.passed is False]

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        lines = [self.title, "", *_table(self.findings), ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAIL {finding.check}: {finding.cause}" for finding in self.failed]
        lines += [self.details] if self.details else []
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        looked_at = [finding for finding in self.findings if finding.passed is not None]
        return f"{len(looked_at) - len(self.failed)} of {len(looked_at)} checks passed"


def _table(findings: list[Finding]) -> list[str]:
    rows = [(f.check, f.compared, f.measured, f.result) for f in findings]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return [
        f"{check:<{widths[0]}}  {compared:<{widths[1]}}  {measured:>{widths[2]}}  {result}"
        for check, compared, measured, result in (COLUMNS, *rows)
    ]
