"""What standard output can show: lines that are drawn again, and colours."""

import os
import sys

COLOURS = {"red": 31, "green": 32, "yellow": 33}


def can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def coloured(text: str, colour: str) -> str:
    """On a terminal alone, and not where NO_COLOR is set (no-color.org)."""
    has_colours = can_redraw() and not os.environ.get("NO_COLOR")
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if has_colours else text
