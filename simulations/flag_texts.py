"""Help texts of flags, which stand in the docstring of the class or function that defines them."""

import inspect
import re
from typing import Any

_SECTION = re.compile(r"^(?:Attributes|Flags):\n((?:  .+\n)+)", re.MULTILINE)
# Further lines of an entry are indented more.
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n {3,}.*)*)", re.MULTILINE)


def of(documented: Any) -> dict[str, str]:
    """Returns the texts of the ``Attributes:`` or ``Flags:`` of a docstring, by name.

    Args:
      documented: A class or a function whose docstring has one of the two sections.
    """
    section = _SECTION.search(f"{inspect.getdoc(documented)}\n")
    assert section is not None
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section[1])}
