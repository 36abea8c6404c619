"""Sizes of text, and text in lines that are not too long."""

import textwrap

# Text, in points.
TITLE, TEXT, SMALL = 11, 10, 9
POINTS_PER_INCH = 72
# Of a character, on average, in units of the size of its text.
WIDTH_OF_CHARACTER = 0.6
# Longer names are broken into lines.
CHARACTERS_OF_NAME = 32


def in_lines(text: str, most_characters: int) -> str:
    """Returns text in lines of at most so many characters; its own line breaks stay.

    Args:
      text: The text.
      most_characters: Of a line; a word that is longer is broken too.
    """
    found = []
    for line in text.split("\n"):
        found += textwrap.wrap(line, max(8, most_characters), break_on_hyphens=False) or [""]
    return "\n".join(found)
