"""Numbers of documents that an experiment measured are those of its result file.

Each line of a page with an interval (a number, plus or minus another one) is of a result below
docs/reproduction/, or of a section that docs/reproduction.md lists as measured without a file.
Pages that state the same result have the same number.
"""

import json
import pathlib
import re
from typing import Any

import pytest

from tests.console_commands import ROOT

_RESULTS = ROOT / "docs" / "reproduction"
_INTERVAL = re.compile(r"(\d+\.\d+)(?: %)? ± (\d+\.\d+)")
# The lines of a page, by a regular expression, and the result that has their intervals.
_SOURCES = [
    ("docs/reproduction.md", r"BandMF Fig. 1 \(b\)", "bandmf-figure-1b"),
    ("docs/reproduction.md", r"BandMF Fig. 11", "bandmf-figure-11"),
    (
        "docs/reproduction.md",
        r"\| (?P<row>[^|]+) \|(?: [78]\d.\d+ ± [\d.]+ \|){4}$",
        "fashion-mnist",
    ),
    ("docs/reproduction.md", r"\| without noise \|", "fashion-mnist shakespeare"),
    ("docs/quick-start.md", r"reproduction.md#training|^aggregation \(", "bandmf-figure-11"),
]
_PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")]
)


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _intervals(name: str) -> dict[str, list[tuple[float, float]]]:
    """The intervals of a result by the labels of its rows, in their order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in _result(name)["rows"]:
        label = re.sub(r"^epsilon [\d.]+, ", "", row["row"])
        for mean, half in _INTERVAL.findall(row["reason"] or ""):
            found.setdefault(label, []).append((float(mean), float(half)))
    return found


def _source(page: str, line: str) -> tuple[re.Match[str], str] | None:
    for where, pattern, name in _SOURCES:
        match = re.search(pattern, line)
        if where == page and match:
            return match, name
    return None


def _is_rounded(printed: tuple[str, str], known: tuple[float, float]) -> bool:
    """Whether two printed numbers are known ones, rounded to the digits that are printed."""
    return all(
        abs(float(text) - value) <= 0.501 * 10.0 ** -len(text.partition(".")[2])
        for text, value in zip(printed, known, strict=True)
    )


def _is_right(printed: list[tuple[str, str]], match: re.Match[str], names: str) -> bool:
    known = [_intervals(name) for name in names.split()]
    label = match.groupdict().get("row")
    if label is None:
        values = [each for of in known for row in of.values() for each in row]
        return all(any(_is_rounded(each, value) for value in values) for each in printed)
    expected = known[0].get(label.partition(" (")[0], [])
    return len(expected) == len(printed) and all(map(_is_rounded, printed, expected))


def _wrong_lines(page: str, text: str) -> tuple[list[str], dict[str, int]]:
    """The lines whose intervals are not those of their result.

    The second value is the number of intervals without a result, by the anchors of sections.
    """
    wrong, others, section = [], dict[str, int](), ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-")
        printed, source = _INTERVAL.findall(line), _source(page, line)
        if line.count("±") != len(printed) or re.search(r"\d *%? (\+-|\+/-)", line):
            wrong.append(line)
        elif printed and source is None:
            others[section] = others.get(section, 0) + len(printed)
        elif printed and source is not None and not _is_right(printed, *source):
            wrong.append(line)
    return wrong, others


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _measured_without_a_file() -> dict[str, dict[str, tuple[str, str, int]]]:
    """The version, the runs and the number of intervals, by page and by anchor of a section."""
    found: dict[str, dict[str, tuple[str, str, int]]] = {}
    section = _text("docs/reproduction.md").partition("## Measured without a result file")[2]
    for page, anchor, version, runs, count in re.findall(
        r"\| \[[^]]+\]\((\S+)#(\S+)\) \| ([^|]+) \| ([^|]+) \| (\d+) \|", section
    ):
        found.setdefault(f"docs/{page}", {})[anchor] = (version, runs, int(count))
    return found


@pytest.mark.parametrize("path", _PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_intervals_are_those_of_result_files(path: pathlib.Path) -> None:
    page = path.relative_to(ROOT).as_posix()
    if page in ("README.md", "docs/reproduction/report.md"):
        # README repeats an interval of another page, and the report is made from the files: other
        # tests compare them.
        return
    text = _text(page)
    wrong, others = _wrong_lines(page, text)
    assert wrong == []
    listed = _measured_without_a_file().get(page, {})
    assert others == {anchor: count for anchor, (_, _, count) in listed.items()}, (
        "name the result file of these intervals, or list their section in docs/reproduction.md"
    )
    for anchor, (version, runs, _) in listed.items():
        # A section may rely on what an earlier one of the page says.
        words = " ".join(_until_the_end_of(text, anchor).split()).lower()
        assert f"measured by {version} ([no file has the runs](" in words, anchor
        assert re.search(rf"\b{runs} (further )?(runs|seeds)\b", words), anchor


def _until_the_end_of(text: str, anchor: str) -> str:
    """The text of a page until the section ends that has the anchor."""
    parts = re.split(r"(?m)^(?=#+ )", text)
    (index,) = (
        n
        for n, part in enumerate(parts)
        if re.sub(r"[^\w -]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-")
        == anchor
    )
    return "".join(parts[: index + 1])


def test_the_page_says_which_version_computed_what() -> None:
    page = " ".join(_text("docs/reproduction.md").split())
    versions: dict[str, list[str]] = {}
    for path in sorted(_RESULTS.glob("*.json")):
        versions.setdefault(_result(path.stem)["versions"]["mf-aggregators"], []).append(path.stem)
    for version, names in versions.items():
        if version != "3.0.0.dev0":
            sentence = re.search(rf"of {re.escape(version)} are ((?:`[\w-]+`(?:, | and )?)+)", page)
            assert sentence is not None, version
            assert sorted(re.findall(r"`([\w-]+)`", sentence[1])) == names
    assert "All others are of 3.0.0.dev0." in page


def test_results_on_the_first_screen_are_those_of_fashion_mnist() -> None:
    known, text = _intervals("fashion-mnist"), _text("README.md")
    # The epsilons 1 and 8 of four.
    rows = {"independent noise": "DP-SGD", r"\*\*correlated noise": "BandMF"}
    for start, label in rows.items():
        (row,) = re.findall(rf"^\| {start}.*", text, re.M)
        printed = re.findall(r"(\d+\.\d) ± (\d+\.\d)", row)
        assert [_is_rounded(*pair) for pair in zip(printed, known[label][::3], strict=True)] == [
            1,
            1,
        ]
    (row,) = re.findall(r"^\| no noise.*", text, re.M)
    assert set(_INTERVAL.findall(row)) == {("85.8", "0.3")}
    assert _is_rounded(("85.8", "0.3"), known["without noise"][0])
    amplified = _INTERVAL.findall(" ".join(text.partition("Where a data centre")[2].split()))[:2]
    for each, label in zip(amplified, ("BandMF", "DP-SGD"), strict=True):
        assert _is_rounded(each, known[f"{label}, amplified"][0])
