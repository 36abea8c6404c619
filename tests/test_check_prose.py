"""tools/check_prose.py, which finds docstrings and comments that are riddles."""

import pytest

from tools import check_prose


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('"""Returns what nobody knows: nothing."""', 1),
        ('"""Returns the largest row."""', 0),
        ("x = 1  # Of each run.\n", 1),
        ("# The largest row\n# by itself.\nx = 1\n", 1),
        ("# The row.\n\n# The column.\nx = 1\n", 0),
    ],
)
def test_riddles_are_found(source: str, number: int) -> None:
    assert len(check_prose.riddles(source)) == number


def test_lines_that_would_be_items_are_found() -> None:
    page = "*Proof.* It is x\n+ y.\n\n- One\n- Two\n\n```\na\n- b\n```\n\nIf P[T\n>= c] < 1.\n"
    assert check_prose.lost_signs(page) == ["+ y.", ">= c] < 1."]
