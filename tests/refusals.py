"""What a test expects of a refusal: its type and the names in its message, not its sentences."""

import re

import pytest


def refuses(
    name: str, *more: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> pytest.RaisesExc[Exception]:
    """Expects an error whose message has names as whole words, in any order.

    Args:
      name: A parameter, flag, file, class, value or whatever else says which check refused.
      *more: Further names.
      error: Its type.

    Returns:
      A context manager, as :func:`pytest.raises` returns it.
    """
    found = "".join(rf"(?=.*(?<!\w){re.escape(each)}(?!\w))" for each in (name, *more))
    return pytest.raises(error, match=rf"(?s)\A{found}")
