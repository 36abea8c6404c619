"""Turns docstrings and plain text into sentences of StackOverflow's token format.

TFF's StackOverflow data holds one sentence an example, prepared so: lower case, HTML symbols
unescaped, non-ascii symbols removed, punctuation separated into tokens of its own except
apostrophes and hyphens, white space collapsed, and every URL replaced by one special token.
`tokenize` does the same to any sentence. `sentences_of_text` splits prose into sentences, and
`sentences_of_docstring` first finds the prose of a docstring: it knows reStructuredText, Markdown,
and the Google and NumPy section styles well enough to leave out code, tables, formulas, type
declarations and headings.
"""

import html
import inspect
import re
from collections.abc import Sequence

URL_TOKEN = "<URL>"

# A sentence must have at least this many words, and words must be at least this share of its
# tokens; headings and remnants of code have fewer.
MIN_WORDS = 3
_MIN_WORD_SHARE = 0.65
# The most tokens of a sentence: longer ones are lists of names that lost their line breaks.
MAX_TOKENS = 120

_URL = re.compile(
    r"(?:\b(?:https?|ftp)://|\bwww\.)[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]", re.IGNORECASE
)
_TOKEN = re.compile(r"<URL>|[A-Za-z0-9]+(?:['-]+[A-Za-z0-9]+)*|[!-/:-@\[-`{-~]")
_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*\Z")
_HTML_TAG = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*(?:\s[^<>]*)?/?>")
_UNICODE_PUNCTUATION = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
)

# Abbreviations: a full stop after one of them does not end a sentence.
_ABBREVIATIONS = re.compile(
    r"(?:al|approx|cf|ch|dept|dr|e\.g|eg|eqs?|esp|etc|figs?|i\.e|ie|incl|mr|mrs|ms|nos|pp?|prof"
    r"|refs?|resp|sec|st|viz|vol|vs|w\.r\.t|wrt)\Z",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`*<]*[A-Z0-9])")

# Headings of docstring sections that consist of names, not of prose.
_DROPPED_SECTIONS = re.compile(
    r"(?:authors?|bibliography|citation|copyright|inherited members|license|methods|references?"
    r"|routine listings|see also)\Z"
)
_FIELD = re.compile(r":(?P<kind>[a-zA-Z]+)(?:\s+[^:]*)?:(?:\s+|\Z)")
_DROPPED_FIELDS = frozenset(("type", "rtype", "vartype", "meta", "copyright", "license"))
_DIRECTIVE = re.compile(r"\.\.\s+(?:\|[^|]*\|\s*)?(?P<name>[a-zA-Z_:-]+?)::")
_PROSE_DIRECTIVES = re.compile(
    r"(?:admonition|attention|caution|danger|deprecated|hint|important|note|rubric|seealso|tip"
    r"|topic|versionadded|versionchanged|warning)\Z"
)
_BULLET = re.compile(r"(?:[-*+\u2022]|\(?[0-9]{1,2}[.)]|\(?[a-z]\))\s+")
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+_:.])\1{2,}\s*\Z")
_TABLE = re.compile(r"\+[-=+]{3,}|\|.*\||.*\S\s{3,}\S.*\s{3,}\S")
_TABLE_BORDER = re.compile(r"(?:[=-]{2,}\s+)+[=-]{2,}\s*\Z")
_GOOGLE_PARAMETER = re.compile(
    r"(?P<name>[`*]*[A-Za-z_][\w.*`,/\[\]-]*(?:,\s[`*]*\w+`?)*)\s*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?"
    r"\s*:\s+(?P<rest>\S.*)"
)
_NUMPY_PARAMETER = re.compile(r"[`*]*[A-Za-z_][\w.*`]*(?:\s*,\s*[`*]*\w+`*)*\s*:(?:\s.*)?\Z")
_GOOGLE_SECTION = re.compile(r"[A-Z][A-Za-z]*(?:\s[A-Za-z]+){0,3}:\Z")
_FORMULA = re.compile(r"\\[A-Za-z(\[{]|\$\$|\$[^$]+\$|\^\{|_\{|\{[^}]*\}|[=<>!]=|->|=>")

_INLINE_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), " "),  # an image
    (re.compile(r"\[([^\]]+)\]\(([^)\s]+)[^)]*\)"), r"\1"),  # a Markdown link
    (re.compile(r"\[([^\]]+)\]\[[^\]]*\]"), r"\1"),
    (re.compile(r"\s*\[[#*]?[A-Za-z0-9_+-]*\]_"), ""),  # a citation
    (re.compile(r"\s*\[[0-9]{1,2}(?:,\s*[0-9]{1,2})*\]"), ""),
    # A Sphinx role and a reStructuredText link, each perhaps with a target in angle brackets.
    (re.compile(r":[a-zA-Z][\w:+.-]*:`[~!]?\.?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),
    (re.compile(r"`+([^`]*)`+_*"), r"\1"),
    (re.compile(r"\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}"), r"\1"),
    (re.compile(r"(?<![\w])_([^\s_][^_]*)_(?![\w])"), r"\1"),
    (re.compile(r"\|([A-Za-z_][\w ]*)\|_?"), r"\1"),  # a substitution of reStructuredText
    # mark-up that only TensorFlow has
    (re.compile(r"@(?:end_)?compatibility(?:\([a-zA-Z]*\))?"), " "),
)


def tokenize(sentence: str) -> tuple[str, ...]:
    """Splits one sentence into tokens as the StackOverflow data is.

    Tokens are lower-case ascii words, which keep inner apostrophes and hyphens, single punctuation
    characters, and `URL_TOKEN` for each URL.
    """
    text = html.unescape(sentence).translate(_UNICODE_PUNCTUATION)
    # URL_TOKEN is inserted after lower-casing, so that it keeps its capitals.
    pieces = _URL.split(text)
    lowered = f" {URL_TOKEN} ".join(piece.lower().replace("<url>", URL_TOKEN) for piece in pieces)
    return tuple(_TOKEN.findall(lowered.encode("ascii", "ignore").decode("ascii")))


def is_prose(tokens: Sequence[str]) -> bool:
    """Tells a sentence from a heading, a list of symbols and a remnant of code.

    A sentence has `MIN_WORDS` words or more, most of its tokens are words, most of those longer
    than one letter, and it is not overly long.
    """
    if len(tokens) > MAX_TOKENS:
        return False
    words = [token for token in tokens if _WORD.match(token)]
    long_words = sum(1 for word in words if len(word) > 1)
    return (
        len(words) >= MIN_WORDS
        and long_words >= 2
        and len(words) >= _MIN_WORD_SHARE * len(tokens)
        and long_words >= 0.7 * len(words)
    )


def split_sentences(paragraph: str) -> list[str]:
    """Splits a paragraph without structure at its full stops, question and exclamation marks.

    A mark ends a sentence where white space and a capital or a digit follow and it is not part of
    an abbreviation. White space is collapsed.
    """
    text = " ".join(paragraph.split())
    sentences = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        last_word = text[start : match.start()].rsplit(" ", 1)[-1].lstrip("([\"'`").rstrip(".")
        if text[match.start() - 1] == "." and (
            _ABBREVIATIONS.match(last_word) or (len(last_word) == 1 and last_word.isupper())
        ):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    remainder = text[start:].strip()
    if remainder:
        sentences.append(remainder)
    return sentences


def sentences_of_text(text: str) -> list[tuple[str, ...]]:
    """Returns the tokens of each sentence of plain text. Blank lines separate paragraphs."""
    sentences = (
        tokenize(sentence)
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in split_sentences(paragraph)
    )
    return [tokens for tokens in sentences if tokens]


def sentences_of_docstring(docstring: str) -> list[tuple[str, ...]]:
    """Returns the tokens of each sentence of a docstring's prose (see `is_prose`).

    Code, tables, formulas, type declarations and headings are left out.
    """
    sentences = []
    for paragraph in _paragraphs(inspect.cleandoc(docstring)):
        for sentence in split_sentences(_without_markup(paragraph)):
            if _FORMULA.search(sentence):
                continue
            tokens = tokenize(sentence)
            if is_prose(tokens):
                sentences.append(tokens)
    return sentences


def _without_markup(paragraph: str) -> str:
    """Removes inline mark-up from a paragraph and keeps the marked words."""
    text = html.unescape(paragraph)
    for pattern, replacement in _INLINE_MARKUP:
        text = pattern.sub(replacement, text)
    return _HTML_TAG.sub(" ", text)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a docstring's prose, without its code and tables.

    A line belongs to the paragraph above unless a blank line, a bullet, a parameter name, a
    directive or a smaller indentation starts anew.
    """
    lines = _without_fences(text.expandtabs().splitlines())
    paragraphs: list[list[str]] = [[]]
    previous_indentation = 0
    for line in _without_headings(_without_literal_blocks(lines)):
        stripped, indentation = line.strip(), _indentation(line)
        begins, content, bullet_width = True, "", 0
        if stripped and not _TABLE.match(stripped) and not _GOOGLE_SECTION.match(stripped):
            bullet = _BULLET.match(stripped)
            bullet_width = bullet.end() if bullet else 0
            is_item, content = _item(stripped[bullet_width:], indentation > previous_indentation)
            # A line with smaller indentation begins a new paragraph, except after the summary line.
            begins = is_item or bullet_width > 0 or indentation < previous_indentation
        if begins:
            paragraphs.append([])
        if content:
            paragraphs[-1].append(content)
        if stripped:
            previous_indentation = indentation + bullet_width
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def _item(text: str, is_deeper: bool) -> tuple[bool, str]:
    """Returns whether a line describes a field or a parameter, and the prose in the line."""
    if field := _FIELD.match(text):
        return True, "" if field["kind"].lower() in _DROPPED_FIELDS else text[field.end() :]
    google, numpy = _GOOGLE_PARAMETER.match(text), _NUMPY_PARAMETER.match(text)
    if google and _is_parameter_name(google["name"], text):
        # "x : array_like, shape (n,)" declares a type; the NumPy style puts a space before the
        # colon, the Google style does not.
        declares_type = numpy and re.match(r"[^:]*\s:", text)
        return True, "" if declares_type else google["rest"]
    if numpy and not is_deeper:
        return True, ""
    return False, text


def _is_parameter_name(name: str, content: str) -> bool:
    """Tells "axis: The axis to sum over" from a sentence with a colon, "Note: this is slow"."""
    single = "," not in name and " " not in name
    return single or re.match(r"[`*]*\w+[`*]*(?:,\s*[`*]*\w+[`*]*)*\s*[:(]", content) is not None


def _without_fences(lines: list[str]) -> list[str]:
    """Replaces Markdown's fenced code, doctest blocks and tables by blank lines."""
    kept = []
    fence: str | None = None
    in_block = False
    for line in lines:
        stripped = line.strip()
        if fence is not None:
            if stripped.startswith(fence):
                fence = None
            kept.append("")
        elif stripped.startswith(("```", "~~~")) and stripped.count("```") != 2:
            fence = stripped[:3]
            kept.append("")
        elif (
            stripped.startswith((">>>", "In ["))
            or _TABLE_BORDER.match(stripped)
            or (in_block and stripped)
        ):
            # Drop all lines up to the next blank line: they are a doctest's output or a table's
            # rows.
            in_block = True
            kept.append("")
        else:
            in_block = False
            kept.append(line)
    return kept


def _without_literal_blocks(lines: list[str]) -> list[str]:
    """Removes indented code after "::", and directives with their content unless it is prose."""
    kept = []
    # Lines with more indentation than this belong to a dropped block, and are dropped too.
    dropped_above: int | None = None
    for line in lines:
        stripped = line.strip()
        if not stripped:
            kept.append("")
            continue
        indentation = _indentation(line)
        if dropped_above is not None and indentation > dropped_above:
            kept.append("")
            continue
        content, drops_what_is_deeper = _directive_or_text(line)
        dropped_above = indentation if drops_what_is_deeper else None
        kept.append(content)
    return kept


def _directive_or_text(line: str) -> tuple[str, bool]:
    """Returns a line's prose, and whether to drop the more indented lines after it."""
    stripped = line.strip()
    if directive := _DIRECTIVE.match(stripped):
        if not _PROSE_DIRECTIVES.match(directive["name"].lower()):
            return "", True
        argument = stripped[directive.end() :].strip()
        # A short argument, as the number in "versionadded:: 1.4", is not prose.
        is_text = len(argument.split()) > 2
        return " " * _indentation(line) + argument if is_text else "", False
    if stripped.startswith(".. ") or stripped == "..":
        return "", True
    if stripped.endswith("::"):
        return line.rstrip()[:-1], True
    return line, False


def _without_headings(lines: list[str]) -> list[str]:
    """Removes underlined headings, and whole sections without prose."""
    kept: list[str] = []
    # The indentation of the heading of a section that is being dropped; None outside such sections.
    dropped_at: int | None = None
    for position, line in enumerate(lines):
        stripped = line.strip()
        following = lines[position + 1].strip() if position + 1 < len(lines) else ""
        is_underline = _UNDERLINE.match(stripped) is not None
        if not is_underline and _is_heading(stripped, following):
            name = stripped.strip("#: ").lower()
            dropped_at = _indentation(line) if _DROPPED_SECTIONS.match(name) else None
            kept.append("")
        elif is_underline or (dropped_at is not None and _indentation(line) >= dropped_at):
            kept.append("")
        else:
            kept.append(line)
    return kept


def _is_heading(stripped: str, following: str) -> bool:
    """Returns whether a line looks like a heading, or is underlined by the next line."""
    if not stripped:
        return False
    is_underlined = _UNDERLINE.match(following) is not None and len(stripped) < 80
    return is_underlined or stripped.startswith("#") or bool(_GOOGLE_SECTION.match(stripped))
