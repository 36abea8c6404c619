"""Names of clients: which look alike, and which a ledger can keep.

Participations are counted by name. Two names that look like one make two clients of one, and the
guarantee that follows is better than the truth: so no name may hold what cannot be seen, and names
that differ in case, width or normal form alone are counted and reported.
"""

import collections
import re
import unicodedata
from collections.abc import Iterable

# Unicode's property Default_Ignorable_Code_Point, of DerivedCoreProperties.txt, first and last
# character of each range. Python has it in no module. Versions 14.0 (Perl 5.36) and 17.0 (the
# package regex) have the same 4,174 characters: characters that are not assigned yet are among
# them, so that it hardly ever changes.
_DEFAULT_IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
# Unicode's property White_Space, of PropList.txt, the same in both versions.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
# Blank characters of braille, musical notes, Egyptian hieroglyphs and the Khitan script, which have
# neither property.
_BLANKS = "\u2800\U0001d159\U00013441\U00013442\U00016fe4"
# Categories of characters that control, mark up or order others, with neither property.
_CONTROLS = frozenset({"Cc", "Cf"})
# Categories of characters that fonts show as one and the same box.
_WITHOUT_SHAPE = frozenset({"Cn", "Co", "Cs"})

_IS_IGNORABLE = re.compile("[" + "".join(f"{chr(a)}-{chr(b)}" for a, b in _DEFAULT_IGNORABLE) + "]")


class _Seen(dict[int, str | None]):
    """A table of ``str.translate``, filled as it is used: what is seen of each character."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        seen: str | None = character
        if character in _WHITE_SPACE or character in _BLANKS:
            seen = " "
        elif _is_hidden(character):
            seen = None
        self[code] = seen
        return seen


class _Shapes(dict[int, str]):
    """A table of ``str.translate``: one character for all that fonts have no shape for."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        has_none = unicodedata.category(character) in _WITHOUT_SHAPE
        self[code] = "\ufffd" if has_none else character
        return self[code]


_SEEN, _SHAPES = _Seen(), _Shapes()


def hidden_character(name: str) -> str | None:
    """Returns the first character of a name that cannot be seen; None if there is none.

    These are the characters with Unicode's property Default_Ignorable_Code_Point, those with
    White_Space but for the space itself, all of the categories Cc and Cf, and blanks of notations
    and scripts.

    Args:
      name: The name.
    """
    if name.isascii() and name.isprintable():
        return None
    return next((each for each in name if each != " " and _is_hidden(each)), None)


def in_one_form(name: str) -> str:
    """Returns a name without what cannot be seen, in Unicode's normal form C.

    White space and blanks are one space each time, and none at the ends. Names of one form are
    the same text to whoever reads them.

    Args:
      name: The name.

    Returns:
      The form, which is its own form; empty for a name that cannot be seen at all.
    """
    # What was removed may have stood between a letter and its accent.
    return unicodedata.normalize("NFC", _seen(name))


def folded(name: str) -> str:
    """Returns what names that differ in case, width or normal form alone have in common.

    Unicode's NFKC_Casefold of :func:`in_one_form`, with one character in place of all those that
    fonts have no shape for.

    Args:
      name: The name.
    """
    if name.isascii() and name.isprintable():
        return " ".join(name.lower().split())
    text = unicodedata.normalize("NFD", _seen(name))
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKD", text.casefold()).casefold())
    return _seen(text).translate(_SHAPES)


def num_alike(names: Iterable[str]) -> int:
    """Returns how many of some different names look like another of them.

    Args:
      names: The names, none twice.

    Returns:
      The number of names of which another one is :func:`folded` to the same.
    """
    found = collections.Counter(map(folded, names))
    return sum(number for number in found.values() if number > 1)


def warning(number: int) -> str:
    """Returns a warning of names that look alike, in whole sentences.

    Args:
      number: What :func:`num_alike` returned, above 0.
    """
    return (
        f"{number} clients have names that look like another client's: they differ in case, width, "
        "normal form or unseen characters alone. Each counts as a client of its own. If two of "
        "them are one, its participations are counted apart, and its guarantee is weaker than "
        "what is stated here."
    )


def check(names: Iterable[str]) -> None:
    """Checks that a ledger can keep names: what is read is then what was written.

    Args:
      names: The names of all clients of a run.

    Raises:
      ValueError: If one is no text, is empty, holds a null character, with which files end
        texts, or half of a character's two surrogates, which no file holds; or if there are two
        of one name.
    """
    found = tuple(names)
    for each in found:
        if not isinstance(each, str):
            raise ValueError(
                f"client ids must be texts, found {each!r} ({type(each).__name__}): ledgers keep "
                "texts, and a run with others could not be resumed. Give str(id) for each, and "
                "have client_dataset take these texts."
            )
    # All at once: there may be millions, and this is asked in every round.
    together = "".join(found)
    if "\0" in together or not (together.isascii() or _is_whole(together)) or "" in found:
        wrong = next(each for each in found if not each or "\0" in each or not _is_whole(each))
        raise ValueError(
            f"the client id {wrong!r} is empty, holds a null character or half of a surrogate "
            "pair, which no file keeps: rename the client."
        )
    if len(set(found)) != len(found):
        raise ValueError(
            "two clients have the same name, and participations are counted by name: give each "
            "client one of its own."
        )


def _is_whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_hidden(character: str) -> bool:
    return (
        character in _WHITE_SPACE
        or character in _BLANKS
        or unicodedata.category(character) in _CONTROLS
        or _IS_IGNORABLE.match(character) is not None
    )


def _seen(name: str) -> str:
    """Returns a name with one space for white space, and without all else that is hidden."""
    # Without an argument, split would take some more characters for white space.
    return " ".join(filter(None, name.translate(_SEEN).split(" ")))
