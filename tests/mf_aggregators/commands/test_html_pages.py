"""Pages: what stands on them, whatever it is made of, and where they are written."""

import pathlib

import pytest
from absl import flags

from mf_aggregators import figures
from mf_aggregators.commands import html_pages
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.commands.html_pages import Commands, Paragraph, Picture, Section, Table
from mf_aggregators.figures import svg_elements
from tests import page_checks

_AWKWARD = "</p><script>alert('1 & \"2\"')</script>"


def _picture(caption: str) -> Picture:
    figure, ((axes,),) = figures.panels(1, 1, (3.0, 2.0))
    figures.bars(axes, ["banded", "tree"], [1.0, 2.0], title="Errors")
    return Picture(figure, caption)


def test_text_of_any_kind_is_shown_as_it_is(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deeper" / "page.html"
    html_pages.write(
        path,
        _AWKWARD,
        [
            Section("", [Paragraph(_AWKWARD), Paragraph("only if", is_condition=True)]),
            Section(_AWKWARD, [_picture(_AWKWARD), _picture("another")]),
            Section("Numbers", [Table(_AWKWARD, (_AWKWARD, "b", "c"), [(_AWKWARD, "1", "2")], 0)]),
            Section("To run it", [Commands(f"# {_AWKWARD}\nmf-plan --x='a b'  --y")]),
        ],
    )
    page = page_checks.read(path)
    assert page.faults == []
    assert page.paragraphs == [_AWKWARD, "only if"]
    assert page.conditions == ["only if"]
    assert page.captions == [_AWKWARD, "another"]
    assert page.tables == [[[_AWKWARD, "b", "c"], [_AWKWARD, "1", "2"]]]
    assert page.marked == [[_AWKWARD, "1", "2"]]
    assert page.commands == [f"# {_AWKWARD}\nmf-plan --x='a b'  --y"]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("<p>", "<p> has no end"),
        ("</div>", "</div> ends nothing"),
        ("<p id='a'></p><p id='a'></p>", "2 parts are a"),
        ("<script src='https://a.b/c.js'></script>", "<script> refers to https://a.b/c.js"),
        ("<p style='background: url(a.png)'></p>", "<p> names background: url(a.png)"),
        ("<style>@import 'a.css'</style>", "a style names another file"),
        ("<a href='#b'></a>", "nothing is b"),
        ("<svg></svg>", "a figure says nothing to who does not see it"),
        ("<div><table></table></div>", "a table is in no box that scrolls"),
        ("<p onclick='a()'></p>", "<p> has a script"),
        ("<p style='fill: var(--x)'></p>", "--x has no colour in the dark"),
    ],
)
def test_what_the_checks_of_pages_see(broken: str, fault: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html_pages.text("A page", [Section("", [Paragraph("Text.")])]))
    assert page_checks.read(path).faults == []
    path.write_text(path.read_text().replace("<footer>", f"{broken}<footer>"))
    assert fault in page_checks.read(path).faults


def test_figures_and_the_page_have_one_background_in_the_dark() -> None:
    _, _, in_the_dark = html_pages.text("A page", []).partition("prefers-color-scheme: dark")
    assert f"--background: {svg_elements.DARK_BACKGROUND};" in in_the_dark


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(CommandError, match=r"--report=.*cannot be written"):
        html_pages.write(tmp_path / "file" / "page.html", "A page", [])
    assert (tmp_path / "file").read_text() == "old"


def test_the_command_of_a_page_has_the_flags_that_were_given() -> None:
    values = flags.FlagValues()
    flags.DEFINE_string("dataset", None, "", flag_values=values)
    flags.DEFINE_string("unused", "x", "", flag_values=values)
    flags.DEFINE_bool("fast", True, "", flag_values=values)
    values(["mf-plan", "--dataset=it's mine", "--nofast"])
    (commands,) = html_pages.how_it_was_made("mf-plan", values).parts
    assert commands == Commands("mf-plan '--dataset=it'\"'\"'s mine' --nofast")
