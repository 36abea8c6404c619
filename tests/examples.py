"""How many examples a randomised check draws in the short test, and in the long one."""

import os

# conftest.py sets it for the long test, before test modules are imported.
_LONG_TEST = "MF_AGGREGATORS_LONG_TEST"


def examples(number: int) -> int:
    """Returns how many examples to draw.

    Args:
      number: How many the long test draws; the short one draws a fourth, and at least four.
    """
    return number if _LONG_TEST in os.environ else max(4, number // 4)
