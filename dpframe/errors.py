"""What a user did wrong, in one line: what, what was given, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Ends the run with its one line and exit code 2; any other exception is a bug of ours."""


def suggestion(given: str, valid: Iterable[str]) -> str:
    """'did you mean X?', or the list of what there is when nothing is near."""
    names = sorted(set(valid))
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is: {', '.join(names)}" if names else "there is none"
