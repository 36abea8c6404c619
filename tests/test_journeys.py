"""How many files of the library a journey runs through: the table of ``docs/architecture.md``."""

from collections.abc import Callable

import pytest

from docs.extensions import journeys

# The goals of version 3.0 are 12, 20, 8, 12, 10 and 35.
_MOST = dict(zip(journeys.JOURNEYS, (15, 23, 6, 15, 12, 40), strict=True))


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("journey", journeys.JOURNEYS)
def test_files_whose_functions_run(
    journey: str, record_property: Callable[[str, object], None]
) -> None:
    files = journeys.files_of(journey)
    record_property("files", files)
    assert len(files) <= _MOST[journey], f"{len(files)} files: {files}"


def test_the_table_is_part_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journeys, "files_of", lambda journey: ["mechanism.py", "kernel/claim.py"])
    journeys.table.cache_clear()
    page = (journeys._LIBRARY.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = [page]
    journeys._with_table(None, "architecture", source)
    assert "| epsilon of timers | 2 | `mechanism`, `kernel/claim` |" in source[0]
    journeys.table.cache_clear()
