"""`python -m dpframe` is the command `dpframe`."""

import os
import sys

if __name__ == "__main__":
    # Before dpframe is imported: `-m` has put the current directory first, so that a ./yaml.py
    # there would run in place of the one that is installed. A config's own modules come last.
    here = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] == [here]:
        del sys.path[0]
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:
            sys.path.append(here)  # a checkout without an installation: ranks find dpframe there

    from dpframe.cli import main

    main()
