"""The long description for the package index: the README with links that lead to the repository.

All else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def described(readme: str, repository: str) -> str:
    """The text with whole addresses, as the index knows no file of the repository."""
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")
    readme = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\1{raw}/main/", readme)
    return re.sub(r"(?<=\]\()(?!\w+:|#)", f"{repository}/blob/main/", readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=described(
            (ROOT / "README.md").read_text(encoding="utf-8"), project["urls"]["Homepage"]
        ),
        long_description_content_type="text/markdown",
    )
