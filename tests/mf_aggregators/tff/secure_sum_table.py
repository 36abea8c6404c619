"""The table of secure sums in ``docs/noise.md``: bits, clients, and what rounding changes."""

import dataclasses
import pathlib

_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "noise.md"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      bits: The width of the integers.
      clients: The clients of a round.
      printed: The last cells, by the number of parameters in the header.
    """

    bits: int
    clients: int
    printed: dict[int, str]


def rows() -> list[Row]:
    """Returns the rows of the table as they are printed."""
    text = _PAGE.read_text(encoding="utf-8")
    header, rule, *lines = text.split("| bits | ")[1].split("\n\n")[0].splitlines()
    sizes = [_number(cell.split()[0]) for cell in header.split("|")[1:3]]
    assert rule.startswith("| ---")
    found = []
    for line in lines:
        bits, clients, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found.append(Row(int(bits), _number(clients), dict(zip(sizes, cells, strict=True))))
    return found


def _number(text: str) -> int:
    return int(text.replace(",", ""))
