"""The site: what writes its pages, and what checks it once it is built.

`make docs` builds it with warnings as errors, runs all notebooks, and runs these checks on it. Here
they are tested without Sphinx, which only the site needs.
"""

import io
import pathlib
import re
import tarfile
import zlib
from collections.abc import Callable, Mapping

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from docs.extensions import (
    command_pages,
    journeys,
    mechanism_figures,
    mechanism_pages,
    reference_pages,
    site_checks,
    site_figures,
    site_versions,
    source_pages,
)
from mf_aggregators import catalogue
from mf_aggregators.noise import NoiseStorage
from tests import console_commands, figure_checks
from tests.refusals import refuses

# With a point: identifiers have digits as well.
_NUMBERS = re.compile(r"-?\d+\.\d+")
# Names of parts of a figure, which matplotlib makes of all digits of their places.
_IDS = re.compile(r"\b[a-z]+[0-9a-f]{10}\b")

# The reference


def test_every_name_has_an_entry_and_every_class_a_page(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mf_aggregators.gone.rst").touch()
    reference_pages.write(tmp_path)

    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.rst")}
    links = re.findall(r"^   \w+ <(\S+)>$", "".join(pages.values()), re.MULTILINE)
    assert sorted([*links, "mf_aggregators"]) == sorted(pages)
    types = pages.pop("types")
    assert ".. autoclass:: mf_aggregators.kernel.claim.Guarantee" in types
    text = "".join(pages.values())
    found = set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE))
    assert found == set(site_checks.public_names())
    assert "mf_aggregators.Mechanism" in pages


@pytest.mark.parametrize(
    ("default", "shown"),
    [(NoiseStorage.DISK, "'disk'"), ({"a": 1}, "{'a': 1}"), (print, "..."), (1 << 40, "2**40")],
)
def test_defaults_are_shown_as_typed(default: object, shown: str) -> None:
    assert repr(reference_pages.typed(default)) == shown
    page = "https://docs.python.org/3/library/os.html#os.PathLike"
    assert (reference_pages.page_of("os.PathLike"), reference_pages.page_of("x.Y")) == (page, None)


@pytest.mark.parametrize(
    ("lines", "plain"),
    [
        (["The sum of |x|."], [r"The sum of \|x\|."]),
        (["``|x|`` and `|y|` stay.", "  m: n."], ["``|x|`` and `|y|` stay.", r"  m: \n."]),
        (
            ["Returns:", "  The rows: all.", "", "Raises:", "  ValueError: If not."],
            [":returns: The rows: all.", "", "Raises:", "  ValueError: If not."],
        ),
    ],
)
def test_docstrings_are_text(lines: list[str], plain: list[str]) -> None:
    assert reference_pages.plain(lines) == plain


# The pages of commands and mechanisms


def test_every_command_has_a_page_with_every_flag(tmp_path: pathlib.Path) -> None:
    command_pages.write(tmp_path)

    assert {path.stem for path in tmp_path.glob("*.md")} == set(
        console_commands.of_setup()["commands"]
    )
    for path in tmp_path.glob("*.md"):
        listed = re.findall(r"^`--(\w+)`$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(listed) == sorted(console_commands.flags_of(path.stem))


def test_every_mechanism_has_a_page() -> None:
    pages = {path.stem for path in (console_commands.ROOT / "docs/mechanisms").glob("*.md")}

    assert pages - {"index"} == set(catalogue.ENTRIES)
    for name in catalogue.ENTRIES:
        assert f"({name}.md)" in mechanism_pages.index()
        for option in catalogue.entry(name).options:
            assert f"`--{option}`" in mechanism_pages.options(name)


def test_a_page_without_what_its_picture_needs_is_refused() -> None:
    with refuses("identity.md", "matrix, title"):
        mechanism_pages.with_picture("identity", "# `identity`\n\n```python\nx = 1\n```\n")


# The figures


@pytest.fixture(scope="module")
def drawn() -> dict[str, matplotlib.figure.Figure]:
    return {name: draw() for name, (draw, _) in site_figures.FIGURES.items()}


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("name", site_figures.FIGURES)
def test_figures_are_readable_and_those_of_the_program(
    name: str, drawn: dict[str, matplotlib.figure.Figure]
) -> None:
    assert figure_checks.faults(drawn[name]) == []

    # A layout depends on the last digits of the one before: what is kept is drawn once.
    words = site_figures.FIGURES[name][1]
    written = (site_figures.DIRECTORY / f"{name}.svg").read_text(encoding="utf-8")
    kept, found = (_IDS.sub("", each) for each in (written, site_figures.svg(name)))
    assert _NUMBERS.sub("", kept) == _NUMBERS.sub("", found)
    # Processors round a matrix otherwise, and a figure in its last digits.
    places, others = (np.array(_NUMBERS.findall(each), float) for each in (kept, found))
    np.testing.assert_allclose(places, others, atol=1e-3)
    assert site_figures.image(name)["alt"] == words


def test_the_noise_that_is_drawn_is_that_of_the_printed_mechanism(
    drawn: dict[str, matplotlib.figure.Figure],
) -> None:
    correlated, independent = site_figures.mechanisms()
    above, below = drawn["noise"].axes
    weights = np.linalg.inv(correlated.factorization.strategy_matrix())
    heights = [bar.get_height() for bar in above.patches]
    np.testing.assert_allclose(heights, weights[:12, 0] / weights[0, 0], rtol=1e-9)

    path = console_commands.ROOT / "docs/tutorials/correlated-noise.md"
    page = " ".join(path.read_text(encoding="utf-8").split())
    z = np.random.default_rng(4).normal(size=200)
    bands = [each for each in below.collections if isinstance(each, PolyCollection)]
    last = []
    for mechanism, band, line in zip((independent, correlated), bands, below.lines, strict=True):
        assert mechanism.guarantee(1e-4).epsilon == pytest.approx(8.0, abs=1e-6)
        matrix = mechanism.factorization.strategy_matrix()
        # Columns of participations, at least 25 apart, are orthogonal and of one length.
        gram = matrix.T @ matrix
        np.testing.assert_allclose(np.diag(gram), gram[0, 0])
        np.testing.assert_allclose(np.triu(gram, 25), 0.0, atol=1e-12)
        sensitivity = np.sqrt(8 * gram[0, 0])
        sums = np.cumsum(np.linalg.inv(matrix), axis=0)
        sums *= mechanism.noise_multiplier * sensitivity
        np.testing.assert_allclose(line.get_ydata(), sums @ z, rtol=1e-6)
        deviation = np.linalg.norm(sums, axis=1)
        assert band.get_paths()[0].get_extents().ymax == pytest.approx(max(deviation), rel=1e-6)
        last.append(deviation[-1])
    assert f"{last[1]:.1f} against {last[0]:.1f} clip norms after 200 rounds" in page


def test_the_plan_that_is_drawn_is_the_one_that_is_printed(
    drawn: dict[str, matplotlib.figure.Figure],
) -> None:
    page = (console_commands.ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    above, below = (
        {
            label.get_text(): bar.get_width()
            for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
        }
        for axes in drawn["plan"].axes
    )
    assert min(above, key=above.__getitem__) == "banded 25"
    for name, value in above.items():
        assert re.search(rf"^[* ] {name} +{value:g} ", page, re.MULTILINE)
    for row, who in mechanism_figures.WAYS.items():
        assert re.search(rf"^\| \**{row}\** \| ~?{below[who]:g} \|", page, re.MULTILINE)


# The pages of source files


def test_links_to_source_files_lead_to_pages(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = source_pages.linked()
    assert "mf_aggregators/planning/planner.py" in files
    assert source_pages.page_of(files[0]) == f"source/{files[0][:-3]}"
    (tmp_path / "page.md").write_text("[gone](../gone.py)\n")
    monkeypatch.setattr(source_pages, "_DOCUMENTS", tmp_path)
    with refuses("there is no ../gone.py", error=FileNotFoundError):
        source_pages.linked()


# The checks of a site


def _write_site(folder: pathlib.Path, pages: Mapping[str, str], *names: str) -> None:
    lines = [f"{name} py:function 1 index.html#$ -" for name in names]
    head = "# Sphinx inventory version 2\n# Project: x\n# Version: 1\n# compressed by zlib\n"
    packed = zlib.compress("\n".join(lines).encode())
    (folder / "objects.inv").write_bytes(head.encode() + packed)
    for name, text in pages.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


_PAGE = '<p id="here">x</p><a href="other.html#there">y</a><a href="https://x.org/z">z</a>'
_OTHER = '<p id="there">x</p><img alt="w" src="index.html"><a href="#there">y</a>'


def test_a_good_site_has_no_faults(tmp_path: pathlib.Path) -> None:
    pages = {"index.html": _PAGE, "other.html": _OTHER, "commands/go.html": ""}
    _write_site(tmp_path, pages, "a.b", "a.c")

    assert list(site_checks.faults(tmp_path, ["a.b", "a.c"], ["go"])) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("other.html#there", "none.html", "links to none.html, which is not there"),
        ("other.html#there", "other.html#here", "which has no such place"),
        ("<p ", '<script src="https://cdn.org/x.js"></script><p ', "loads https://cdn.org/x.js"),
        ("<p ", '<img src="other.html"><p ', "no alternative text for other.html"),
        ("<p ", '<link rel="stylesheet" href="https://cdn.org/x.css"><p ', "loads https"),
    ],
)
def test_a_broken_page_is_found(tmp_path: pathlib.Path, old: str, new: str, fault: str) -> None:
    page = _PAGE.replace(old, new)
    assert page != _PAGE
    _write_site(tmp_path, {"index.html": page, "other.html": _OTHER})

    (found,) = site_checks.faults(tmp_path, [], [])
    assert found.startswith("index.html ")
    assert fault in found


def test_what_is_missing_is_found(tmp_path: pathlib.Path) -> None:
    _write_site(tmp_path, {"index.html": ""}, "a.b")

    assert list(site_checks.faults(tmp_path, ["a.b", "a.c"], ["go"])) == [
        "a.c is public and not in the inventory",
        "go has no page",
    ]


# Its versions


def _release(released: pathlib.Path, tag: str, files: Mapping[str, str]) -> None:
    """Packs the site of a release, as its workflow does."""
    (released / tag).mkdir(parents=True)
    with tarfile.open(released / tag / site_versions.ARCHIVE, "w:gz") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))


def _site(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    site = tmp_path / "html"
    site.mkdir()
    (site / "index.html").write_text("latest")
    return site, tmp_path / "released"


def test_released_versions_stand_beside_the_latest(tmp_path: pathlib.Path) -> None:
    site, released = _site(tmp_path)
    for tag in ("v2.0.9", "v2.0.10", "v2.10.0", "v2.9.1", "v3.0.0rc1", "nightly"):
        _release(released, tag, {"html/index.html": tag, "html/_static/versions.js": "of old"})

    assert site_versions.put_beside(site, released) == ["2.10", "2.9", "2.0"]
    assert {path.name for path in site.iterdir()} == {"index.html", "_static", "2.0", "2.9", "2.10"}
    texts = [(site / name / "index.html").read_text() for name in ("2.0", "2.9", "2.10", "")]
    assert texts == ["v2.0.10", "v2.9.1", "v2.10.0", "latest"]
    lists = {"": ["./", "2.10/", "2.9/", "2.0/"], "2.9": ["../", "../2.10/", "./", "../2.0/"]}
    for name, paths in lists.items():
        text = (site / name / "_static" / "versions.js").read_text()
        assert re.findall(r'"name": "([^"]*)"', text) == ["latest", "2.10", "2.9", "2.0"]
        assert re.findall(r'"path": "([^"]*)"', text) == paths
        # Each leads to a site.
        assert all((site / name / path / "index.html").is_file() for path in paths)

    with refuses("is there already"):
        site_versions.put_beside(site, released)


# How many files of the product a journey runs through: the table of ``docs/architecture.md``.


# The goals of version 3.0 are 12, 20, 8, 12, 10, 55 and 35.
_MOST = dict(zip(journeys.JOURNEYS, (12, 18, 5, 11, 9, 55, 35), strict=True))


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
    source = [(journeys._LIBRARY.parent / "docs" / "architecture.md").read_text(encoding="utf-8")]
    journeys._with_table(None, "architecture", source)
    assert "| epsilon of timers | 2 | `mechanism`, `kernel/claim` |" in source[0]
    journeys.table.cache_clear()
