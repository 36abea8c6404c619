"""Forgeries of statements are found, and the program that makes them has some to find."""

import pathlib

from tests.examples import examples
from tests.simulations.runs import forger


def test_forgeries_are_found_or_are_words_of_a_person(tmp_path: pathlib.Path) -> None:
    number = examples(2000, one_in=10)
    counts, missed = forger.forge(forger.write_statements(tmp_path), number, seed=1)
    assert missed == []
    assert counts["found"] > 0.7 * number
    # Few forgeries may miss the words that a person told.
    assert counts["told by a person or a clock"] > 0 or number < 2000
