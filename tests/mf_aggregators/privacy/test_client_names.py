"""Names that nobody can tell apart are found, and names that no ledger keeps are refused."""

import io
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.privacy import client_names
from tests.refusals import refuses


def test_hidden_characters_are_those_of_unicode() -> None:
    """Default_Ignorable_Code_Point (DerivedCoreProperties.txt, 14.0 to 17.0) and white space."""
    ranges = (
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
        *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F)),
        *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
        *((0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    )
    ignorable = {code for first, last in ranges for code in range(first, last + 1)}
    # The number that the file ends its list with.
    assert len(ignorable) == 4174
    every = range(sys.maxunicode + 1)
    hidden = {code for code in every if client_names.hidden_character(chr(code)) is not None}
    assert ignorable <= hidden
    others = hidden - ignorable
    spaces = {code for code in every if chr(code).isspace()} - {0x20}
    assert spaces <= others
    controls = {code for code in every if unicodedata.category(chr(code)) in ("Cc", "Cf")}
    blanks = {0x2800, 0x1D159, 0x13441, 0x13442, 0x16FE4}
    assert others == spaces | (controls - ignorable) | blanks


@pytest.mark.parametrize(
    "character",
    [
        *"\u00ad\u034f\u115f\u1160\u17b4\u180b\u180e\u200b\u200d\u202e\u2060\u3164\ufe00\ufe0f\ufeff",
        *"\uffa0\ufff0\U0001d173\U000e0001\U000e0061\U000e007f\U000e0100\U000e0fff",
        *"\t\n\x00\x1f\x7f\x85\u00a0\u1680\u2003\u2028\u202f\u205f\u3000",
        *"\u2800\ufff9\U0001d159\U00016fe4",
    ],
)
def test_what_cannot_be_seen_is_found(character: str) -> None:
    assert client_names.hidden_character(f"a{character}b") == character
    assert client_names.num_alike(["ab", "a b", f"a{character}b"]) == 2
    assert client_names.in_one_form(f"{character}a{character}") == "a"


def test_what_is_seen_is_no_hidden_character() -> None:
    for name in (
        "ada b",
        "\u00e9",
        "e\u0301",
        "\u65e5\u672c",
        "\U0001f468",
        "\u0e01\u0e33",
        "\u2422",
    ):
        assert client_names.hidden_character(name) is None
        assert client_names.in_one_form(name) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ada", "ADA"),
        ("stra\u00dfe", "STRASSE"),
        ("\u00e9", "e\u0301"),
        ("\uff41\uff44\uff41\uff11", "ada1"),
        ("\ufb01n", "fin"),
        ("\u1e9b\u0323", "\u1e69"),
        ("\u0390", "\u1fd3"),
        ("a b", "a  b"),
        ("\u212b", "\u00e5"),
        ("\u0345\u0301", "\u0301\u03b9"),
    ],
)
def test_names_that_look_alike_are_counted(one: str, other: str) -> None:
    assert client_names.num_alike([one, other, "somebody", "else"]) == 2
    assert client_names.num_alike([one, "somebody", "else"]) == 0


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
def test_names_keep_what_they_fold_to(name: str) -> None:
    """One form and folding change nothing a second time, and see no case, width or normal form."""
    form, folded = client_names.in_one_form(name), client_names.folded(name)
    assert client_names.in_one_form(form) == form
    assert client_names.hidden_character(form) is None
    assert client_names.folded(form) == folded
    assert client_names.folded(folded) == folded
    normalize = unicodedata.normalize
    normal = [normalize("NFC", name), normalize("NFD", name)]
    normal += [normalize("NFKC", name), normalize("NFKD", name)]
    assert {client_names.folded(each) for each in normal} == {folded}
    assert client_names.folded(name.casefold()) == folded


@given(st.lists(st.text(max_size=3), max_size=4))
def test_a_ledger_keeps_the_names_that_pass(names: list[str]) -> None:
    """Against NumPy itself: what passes is written and read as it was."""
    try:
        client_names.check(names)
    except ValueError:
        is_whole = all("\0" not in name and name.isprintable() for name in names)
        assert not is_whole or "" in names or len(set(names)) != len(names)
        return
    archive = io.BytesIO()
    np.savez(archive, names=np.array(names, dtype=np.str_))
    archive.seek(0)
    assert [str(each) for each in np.load(archive)["names"]] == names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([1, 2], ["1", "int"]),
        (["a", np.int64(7)], ["int64"]),
        ([b"a"], ["bytes"]),
        (["a", None], ["NoneType"]),
        (["a", ""], ["empty"]),
        (["a", "b\0"], ["null"]),
        (["a", "\ud800"], ["surrogate"]),
        (["\ud83d", "\ude00"], ["surrogate"]),
        (["a", "b", "a"], ["clients", "name"]),
    ],
)
def test_names_that_no_ledger_keeps_are_refused(names: list[str], words: list[str]) -> None:
    with refuses(*words):
        client_names.check(names)


def test_texts_of_other_libraries_are_names() -> None:
    client_names.check(list(np.array(["a", "\u00e9"])))
