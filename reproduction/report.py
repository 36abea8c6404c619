"""The report: all results in one Markdown file and one HTML page."""

import collections
import html
import pathlib
from collections.abc import Sequence

from mf_aggregators import atomic_files
from reproduction import experiment as kinds
from reproduction.experiment import Row
from reproduction.results import Result

MARKDOWN_FILE = "report.md"
HTML_FILE = "report.html"

_TITLE = "The papers, recomputed"
_STYLE = """
body { font-family: sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 90%; }
th, td { border: 1px solid #bbb; padding: 0.2em 0.6em; text-align: left; }
img { max-width: 100%; }
""".strip()


def write(
    results: Sequence[Result],
    missing: Sequence[str],
    of_other_code: Sequence[str],
    directory: pathlib.Path,
) -> None:
    """Writes the report beside the results.

    Args:
      results: In the order of the report.
      missing: Names of experiments that have no result yet.
      of_other_code: Names of results that other code or versions computed.
      directory: Where the results' figures are.

    Raises:
      OSError: If it cannot be written.
    """
    import markdown  # of the extra ``reports``

    text = to_markdown(results, missing, of_other_code)
    atomic_files.write_text(directory / MARKDOWN_FILE, text)
    body = markdown.markdown(text, extensions=["tables", "toc"])
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(_TITLE)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
    atomic_files.write_text(directory / HTML_FILE, page)


def to_markdown(
    results: Sequence[Result], missing: Sequence[str] = (), of_other_code: Sequence[str] = ()
) -> str:
    """Returns the report as Markdown.

    Args:
      results: In the order of the report.
      missing: Names of experiments that have no result yet.
      of_other_code: Names of results that other code or versions computed.

    Returns:
      A title, a summary with a line for each experiment, and a section for each.
    """
    lines = [f"# {_TITLE}", "", *_summary(results), ""]
    if missing:
        lines += [f"Not computed yet: {', '.join(f'`{name}`' for name in missing)}.", ""]
    if of_other_code:
        names = ", ".join(f"`{name}`" for name in of_other_code)
        lines += [f"Computed by other code or versions than those of this report: {names}.", ""]
    for result in results:
        lines += _section(result, result.name in of_other_code)
    return "\n".join(lines).rstrip() + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """Returns one line that says how many numbers agree, and by how much others differ.

    Args:
      rows: The rows of an experiment.

    Returns:
      ``agreed: ...`` or ``differs: ...`` for printed numbers, and how many claims in words
      hold.
    """
    counts = collections.Counter(row.verdict for row in rows)
    words = []
    printed = counts[kinds.AGREES] + counts[kinds.DIFFERS]
    if counts[kinds.DIFFERS]:
        differences = [
            abs(row.relative_difference)
            for row in rows
            if row.verdict == kinds.DIFFERS and row.relative_difference is not None
        ]
        by = f", by at most {100.0 * max(differences):.3g} %" if differences else ""
        words.append(f"differs: {counts[kinds.DIFFERS]} of {printed} printed numbers{by}")
    elif printed:
        words.append(f"agreed: all {printed} printed numbers, to their printed digits")
    claims = counts[kinds.HOLDS] + counts[kinds.FAILS]
    if claims:
        words.append(f"{counts[kinds.HOLDS]} of {claims} statements in words hold")
    return "; ".join(words) or f"nothing printed to compare with ({len(rows)} numbers of ours)"


def _summary(results: Sequence[Result]) -> list[str]:
    lines = ["| experiment | what | verdict | seconds |", "| --- | --- | --- | --- |"]
    lines += [
        f"| [{result.name}](#{result.name}) | {_cell(result.source)} | "
        f"{_cell(verdict(result.rows))} | {result.seconds:.0f} |"
        for result in results
    ]
    total = sum(result.seconds for result in results)
    versions = {", ".join(f"{k} {v}" for k, v in result.versions.items()) for result in results}
    processors = ", ".join(str(number) for number in sorted({r.processors for r in results}))
    lines += [
        "",
        f"All together {total / 60.0:.0f} minutes, on machines of {processors} processors; where "
        "matrices came from the cache, or runs had finished before, they are not in these times.",
        "",
        "A number agrees if it rounds to the printed digits, or keeps a printed bound; one that "
        "differs has the reason beside it, or that it is not explained. What papers say in words "
        "is repeated in ours, and holds or fails. Errors of factorizations are at sensitivity 1 "
        "and noise multiplier 1 unless a row says otherwise.",
        "",
        *(f"Versions: {version}." for version in sorted(versions)),
    ]
    return lines


def _section(result: Result, is_of_other_code: bool) -> list[str]:
    versions = f", mf-aggregators {result.versions['mf-aggregators']}, other code"
    lines = [
        f"## {result.name}",
        "",
        f"{result.source}. {result.title}.",
        "",
        f"`{result.command}` ({result.seconds:.0f} s{versions if is_of_other_code else ''}): "
        f"{verdict(result.rows)}.",
        "",
        f"![{result.title}]({result.figure_file})",
        "",
        "| where | quantity | paper | ours | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {_cell(row.row)} | {_cell(row.quantity)} | {_cell(row.printed or '-')} | "
        f"{row.ours:.6g} | {_cell(_verdict_of(row))} |"
        for row in result.rows
    ]
    for note in result.notes:
        lines += ["", note]
    return [*lines, ""]


def _verdict_of(row: Row) -> str:
    words = [row.verdict]
    if row.verdict == kinds.DIFFERS and row.relative_difference is not None:
        words.append(f"by {100.0 * row.relative_difference:+.3g} %")
    if row.explanation:
        words.append(f"({row.explanation})")
    return " ".join(words)


def _cell(text: str) -> str:
    # Comparison signs are no markup here, and bars would end the cell.
    return html.escape(text, quote=False).replace("|", "\\|")
