"""What a section has measured: a JSON object a line, written at once, so that nothing is lost."""

import json
from pathlib import Path
from typing import Any


class Records:
    """`kind` is contest, turn, fact, test, note or failure; the page and gpu.json know each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def fact(self, name: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        self.add("fact", name=name, value=value, unit=unit, note=note)

    def note(self, text: str) -> None:
        self.add("note", text=text)

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # all that are whole
