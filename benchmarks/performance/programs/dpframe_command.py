"""The command `python -m dpframe …`, with one callback more that notes the times of its epochs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from dpframe.cli import main  # noqa: E402  as dpframe/__main__.py has it: it imports torch later

if __name__ == "__main__":
    sys.argv += ["+callbacks.notes._target_=notes.Notes", "trusted_modules=[notes,growth]"]
    main()
