"""The site: what writes its pages, and what checks it once it is built.

`make docs` builds it with warnings as errors, runs all notebooks, and runs these checks on it. Here
they are tested without Sphinx, which only the site needs.
"""

import pathlib
import re
import zlib
from collections.abc import Mapping

import matplotlib.pyplot as plt
import pytest

from docs.extensions import command_pages, mechanism_pages, reference_pages, site_checks
from mf_aggregators import catalogue
from tests import console_commands
from tests.refusals import refuses

# The reference


def test_every_name_has_an_entry_on_the_page_of_its_module(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mf_aggregators.gone.rst").touch()
    reference_pages.write(tmp_path)

    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.rst")}
    found = set(pages)
    for module, text in pages.items():
        found |= {
            name if name.startswith(module) else f"{module}.{name}"
            for name in re.findall(r"^\.\. (?:auto|py:)(?!module)\w+:: (\S+)$", text, re.MULTILINE)
        }
        for name in re.findall(r"^   \w+ <(\S+)>$", text, re.MULTILINE):
            assert name in pages
    assert found == set(site_checks.public_names())


def test_every_constant_says_what_it_is() -> None:
    without = [
        f"{page.module}.{name}"
        for page in reference_pages.shared_pages()
        for name, kind in page.names.items()
        if kind == "data" and not reference_pages._comment(page.module, name)
    ]
    # Its page is that of the whole library.
    assert without == ["mf_aggregators.__version__"]


@pytest.mark.parametrize(
    ("lines", "plain"),
    [
        (["The sum of |x|."], [r"The sum of \|x\|."]),
        (["``|x|`` and `|y|` stay."], ["``|x|`` and `|y|` stay."]),
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

    assert pages - {"index"} == set(catalogue.entries())
    for name in catalogue.entries():
        assert f"({name}.md)" in mechanism_pages.index()
        for option in catalogue.entry(name).options:
            assert f"`--{option.name}`" in mechanism_pages.options(name)


def test_a_mechanism_is_drawn_by_the_cell_behind_its_own() -> None:
    pages = console_commands.ROOT / "docs" / "mechanisms"
    for name in catalogue.entries():
        page = (pages / f"{name}.md").read_text(encoding="utf-8")
        drawn = mechanism_pages.with_picture(name, page)
        cells = re.findall(r"^```\{code-cell\} ipython3\n.*?\n\n(.*?)^```$", drawn, re.S | re.M)
        assert len(cells) == page.count("{code-cell}") + 1
        assert cells[0].splitlines()[-1].startswith("matrix, title = factorization.")
        if name == "identity":
            values: dict[str, object] = {}
            for cell in cells:
                exec(compile(cell, name, "exec"), values)
            assert values["kind"] == "exact"
            assert set(values["curves"]) == {"identity", "banded"}  # type: ignore[call-overload]
            plt.close("all")


def test_a_page_without_what_its_picture_needs_is_refused() -> None:
    with refuses("identity.md", "matrix, title"):
        mechanism_pages.with_picture("identity", "# `identity`\n\n```python\nx = 1\n```\n")


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
_OTHER = '<p id="there">x</p><a href="index.html">y</a><a href="#there">y</a>'


def test_a_good_site_has_no_faults(tmp_path: pathlib.Path) -> None:
    pages = {"index.html": _PAGE, "other.html": _OTHER, "commands/go.html": ""}
    _write_site(tmp_path, pages, "a.b", "a.c")

    assert list(site_checks.faults(tmp_path, ["a.b", "a.c"], ["go"])) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("other.html#there", "none.html", "links to none.html, which is not there"),
        ("other.html#there", "other.html#here", "which has no such place"),
        ("other.html#there", "#there", "which has no such place"),
        ("<p ", '<script src="https://cdn.org/x.js"></script><p ', "loads https://cdn.org/x.js"),
        ("<p ", '<img src="//cdn.org/x.png"><p ', "loads //cdn.org/x.png"),
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
