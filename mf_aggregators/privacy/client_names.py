"""Names of clients: which look alike, and which a ledger can keep.

Participations are counted by name. Two names that look like one make two clients of one, and the
guarantee that follows is better than the truth: so no name may hold what cannot be seen, and names
that differ in case, width or normal form alone are counted and reported.
"""

import collections
import functools
import re
import unicodedata
from collections.abc import Iterable

# Characters that are neither controls, formats nor separators, and cannot be seen: those with
# Unicode's property Default_Ignorable_Code_Point, and blanks.
_BLANKS = "\u2800\U0001d159\U00013441\U00013442\U00016fe4"
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


def hidden_character(name: str) -> str | None:
    """Returns the first character of a name that cannot be seen; None if there is none.

    These are the characters with Unicode's property Default_Ignorable_Code_Point, controls,
    formats, separators other than the space, and blanks of notations and scripts.

    Args:
      name: The name.
    """
    if name.isascii() and name.isprintable():
        return None
    return next((each for each in name if each != " " and _is_hidden(each)), None)


def in_one_form(name: str) -> str:
    """Returns a name without invisible characters, in Unicode's normal form C.

    White space and blanks are one space each time, and none at the ends. Names of one form are
    the same text to whoever reads them.

    Args:
      name: The name.

    Returns:
      The form, which is its own form; empty for a name that cannot be seen at all.
    """
    # Removing a character may bring a letter and its accent together.
    return unicodedata.normalize("NFC", _seen(name))


def folded(name: str) -> str:
    """Returns a key that is equal for names that differ in case, width or normal form alone.

    This is Unicode's NFKC_Casefold of :func:`in_one_form`.

    Args:
      name: The name.
    """
    if name.isascii() and name.isprintable():
        return " ".join(name.lower().split())
    text = unicodedata.normalize("NFD", _seen(name))
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKD", text.casefold()).casefold())
    return _seen(text)


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
    try:
        together.encode("utf-8")
        is_kept = "\0" not in together and "" not in found
    except UnicodeEncodeError:
        is_kept = False
    if not is_kept:
        raise ValueError(
            "a client id is empty, holds a null character or half of a surrogate pair, which no "
            "file keeps: rename the client."
        )
    if len(set(found)) != len(found):
        raise ValueError(
            "two clients have the same name, and participations are counted by name: give each "
            "client one of its own."
        )


def _is_hidden(character: str) -> bool:
    return (
        character in _BLANKS
        or unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs")
        or _IGNORABLE.match(character) is not None
    )


@functools.cache
def _seen_character(character: str) -> str:
    if character.isspace() or character in _BLANKS:
        return " "
    return "" if _is_hidden(character) else character


def _seen(name: str) -> str:
    """Returns a name with one space for white space, and without all else that is hidden."""
    return " ".join("".join(map(_seen_character, name)).split())
