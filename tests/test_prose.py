"""First sentences of docstrings, and comments, in plain English: few have a word of a riddle.

A clause that begins with "what" or "whoever", a pronoun for several nouns, and a comment without a
subject make a reader decode. Such words are counted, and some sentences need them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.console_commands import ROOT

_RIDDLES = re.compile(
    r"\b(what|whatever|whoever|whom|whose|nobody|anybody|somebody|none of|so many|so much|"
    r"in the place of|all the same|goes on|went on|for lack of|hardly|as it is|by itself|beside)\b",
    re.IGNORECASE,
)
_HEADLESS = re.compile(
    r"(Of|By|As|Said|That of|Those of|However|Towards|Where|Beside|Without|Neither|Nor|So)\b"
)
# The most sentences with such a word: 31 had one when the limit was set.
_MOST = 60


def _first_sentences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            yield re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()))[0]


def _comments(source: str) -> Iterator[str]:
    found, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        follows = token.start[0] == last + 1
        if not follows:
            yield found
        found = f"{found if follows else ''} {token.string.lstrip('#').strip()}".strip()
        last = token.start[0]
    yield found


def _riddles(source: str) -> list[str]:
    sentences, comments = list(_first_sentences(source)), list(_comments(source))
    found = [each for each in sentences + comments if _RIDDLES.search(each)]
    return found + [each for each in comments if _HEADLESS.match(each)]


def test_few_sentences_are_riddles() -> None:
    folders = {each.parent for each in ROOT.glob("[a-z]*/*.py")} - {ROOT / "tests"}
    files = [path for folder in sorted(folders) for path in sorted(folder.rglob("*.py"))]
    found = [
        f"{path}: {text}"
        for path in files
        if "_build" not in path.parts
        for text in _riddles(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 150
    assert len(found) <= _MOST, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('"""Returns what nobody knows: nothing."""', 1),
        ('"""Returns the largest row."""', 0),
        ("x = 1  # Of each run.\n", 1),
        ("# The largest row\n# by itself.\nx = 1\n", 1),
        ("# The row.\n\n# The column.\nx = 1\n", 0),
    ],
)
def test_riddles_are_found(source: str, number: int) -> None:
    assert len(_riddles(source)) == number
