"""The page that maps statements to NIST's questions quotes what statements say."""

import dataclasses
import functools
import re
from typing import Any

import mf_aggregators as mfa
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.statements import Evidence
from tests.console_commands import ROOT

_PAGE = ROOT / "docs" / "nist-800-226.md"
_QUOTED = re.compile(r'"([^"]+)"')


@functools.cache
def _text() -> str:
    """The texts of statements of which each sentence of the page is in one, in one line."""
    mechanism = mfa.calibrate(
        mfa.factorizations.banded(6, 3), MinSeparation(3), epsilon=2.0, delta=1e-6
    )
    aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
    told: dict[str, Any] = {"population": 40, "public_data": "none", "enforcement": "A timer."}
    alone = aggregator.statement([["ada", "bo"]], **told)
    with_others = alone.with_other_runs({"keyboard 2": mechanism.event()})
    of_files = dataclasses.replace(alone, evidence=Evidence({"ledger.csv": "0" * 64}))
    texts = [each.to_markdown() for each in (alone, with_others, of_files)]
    return " ".join(" ".join(texts).split())


def test_the_page_quotes_statements() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    quotes = _QUOTED.findall(page)
    assert len(quotes) > 20
    for quote in quotes:
        pieces = map(re.escape, quote.split("…"))
        assert re.search(".{1,40}".join(pieces), _text()), quote


def test_each_question_has_an_answer() -> None:
    rows = [row.strip("|").split("|") for row in _PAGE.read_text().splitlines() if row[:1] == "|"]
    questions = [[cell.strip() for cell in row] for row in rows if "?" in row[0]]
    assert len(questions) > 20
    for _, answer in questions:
        assert '"' in answer or "the row" in answer or answer.startswith("not answered"), answer
