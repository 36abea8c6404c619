"""Checks that few sentences are hard to decode, and that pages show their formulas as written.

    python tools/check_prose.py

A clause that begins with "what" or "whoever", a pronoun for several nouns, and a comment without a
subject make a reader decode. Such words are counted in first sentences of docstrings and in
comments, because some sentences need them. Exit status 1 if there are more than the limit.

A line of a paragraph that begins with "+", "-", ">" or "1." becomes an item of a list or a quote on
the site, so that a formula loses its sign: no page of docs/ may have such a line.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
_RIDDLES = re.compile(
    r"\b(what|whatever|whoever|whom|whose|nobody|anybody|somebody|none of|so many|so much|"
    r"in the place of|all the same|goes on|went on|for lack of|hardly|as it is|by itself|beside)\b",
    re.IGNORECASE,
)
_HEADLESS = re.compile(
    r"(Of|By|As|Said|That of|Those of|However|Towards|Where|Beside|Without|Neither|Nor|So)\b"
)
# The most sentences that may have such a word: 31 had one when this limit was set.
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


def riddles(source: str) -> list[str]:
    """Returns the first sentences of docstrings, and the comments, that have such words."""
    sentences, comments = list(_first_sentences(source)), list(_comments(source))
    found = [each for each in sentences + comments if _RIDDLES.search(each)]
    return found + [each for each in comments if _HEADLESS.match(each)]


def lost_signs(page: str) -> list[str]:
    """Returns the lines inside of paragraphs of a page that Markdown takes for items or quotes."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page)
    is_paragraph = re.compile(r"(?![-+*]\s|\d+[.)]\s|[>|:<#\s])")
    blocks = [block for block in re.split(r"\n\s*\n", text) if is_paragraph.match(block)]
    found = [line for block in blocks for line in block.strip().split("\n")[1:]]
    return [line for line in found if re.match(r"([-+*]|1[.)])(\s|$)|>", line)]


def main() -> int:
    """Prints sentences and lines that have to change; returns the exit status."""
    lost = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if "_build" not in path.parts
        for line in lost_signs(path.read_text(encoding="utf-8"))
    ]
    for line in lost:
        print(f"{line} (a list or a quote on the site)")
    folders = {each.parent for each in ROOT.glob("[a-z]*/*.py")} - {ROOT / "tests"}
    files = [path for folder in sorted(folders) for path in sorted(folder.rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in files
        if "_build" not in path.parts
        for text in riddles(path.read_text(encoding="utf-8"))
    ]
    if len(found) > _MOST:
        print("\n".join(found))
        print(f"{len(found)} docstrings and comments are riddles, and at most {_MOST} are allowed.")
    return int(len(found) > _MOST or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
