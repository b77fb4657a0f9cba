"""What a resume compares of the code is the same on every version of Python."""

import hashlib

import pytest

from dpframe.trainer.fingerprint import significant

SOURCE = '''\
"""A task.

  With a blank line, and spaces at an end:  \n"""

import torch  # heavy

def net(width: int) -> str:
    #  how wide

    sizes = [
        width,  # in
        # then

        "#2",
    ]
    return f"a # {width:>{4}} {sizes!r}" \\
        "b"

'''
WITHOUT = '''\
"""A task.

  With a blank line, and spaces at an end:  \n"""
import torch
def net(width: int) -> str:
    sizes = [
        width,
        "#2",
    ]
    return f"a # {width:>{4}} {sizes!r}" \\
        "b"
'''


def test_comments_blank_lines_and_spaces_at_the_ends_of_lines_are_not_significant():
    assert significant(SOURCE) == WITHOUT.rstrip("\n")
    assert significant(SOURCE.replace(" -> str:", " -> str:  # text  ")) == significant(SOURCE)
    assert significant(SOURCE.replace("\n    return", "  \n\n    return")) == significant(SOURCE)
    assert significant(SOURCE.rstrip("\n") + "# the end") == significant(SOURCE)


@pytest.mark.parametrize(
    "old, new", [("width,", "width + 1,"), ("#2", "#3"), ("a #", "a  #"), (".\n\n  W", ".\n  W")]
)
def test_whatever_else_changes_is_significant(old, new):
    assert old in SOURCE
    assert significant(SOURCE.replace(old, new, 1)) != significant(SOURCE)


def test_the_digest_of_a_source_is_no_fact_of_the_version_of_python():
    """3.11 takes an f-string for one token, 3.12 for several; ast.dump differs in each of them."""
    assert hashlib.sha256(significant(SOURCE).encode()).hexdigest()[:16] == "f1d4bbbf3d0255b1"
