"""No text of the product claims pure zCDP of released numbers: what holds is approximate zCDP."""

import pathlib
import re
from collections.abc import Iterator

import pytest

from mf_aggregators import workloads
from mf_aggregators.factorizations import banded, identity
from mf_aggregators.participation import MinSeparation, PoissonSampling
from mf_aggregators.privacy.statements import Statement
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import plan_of

_ROOT = pathlib.Path(__file__).parents[1]
_PRODUCT = ("mf_aggregators", "simulations", "stackoverflow_nwp", "reproduction", "docs")
_PAGES = ("README.md", "CHANGELOG.md", "quickstart.py")
# Names of Python, such as zcdp_rho, claim nothing.
_NAMED = re.compile(r"\bzCDP\b|[Zz]ero-concentrated|\bCDP\b|concentrated differential")
# Pure zCDP is said of real normal numbers alone, which nothing draws, or denied.
_MAY_SAY = re.compile(r"[Aa]pproximate|real normal|no pure|no zCDP|zCDP without an exception")


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, table rows and definitions, with line breaks and quotes of code undone."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)", text):
        yield " ".join(re.sub(r'["\n#]', " ", paragraph).split())


def _claims(text: str) -> list[str]:
    return [
        paragraph
        for paragraph in _paragraphs(text)
        if _NAMED.search(paragraph) and not _MAY_SAY.search(paragraph)
    ]


def _files() -> list[pathlib.Path]:
    found = [_ROOT / page for page in _PAGES]
    for folder in _PRODUCT:
        for ending in ("*.py", "*.md"):
            found += (_ROOT / folder).rglob(ending)
    return [file for file in found if "_build" not in file.parts]


def test_no_file_claims_pure_zcdp() -> None:
    claims = {
        str(file.relative_to(_ROOT)): found
        for file in _files()
        if (found := _claims(file.read_text()))
    }
    assert claims == {}


def test_files_that_say_something_are_read() -> None:
    named = {str(file.relative_to(_ROOT)) for file in _files() if _NAMED.search(file.read_text())}
    assert {"docs/privacy-proofs.md", "docs/guarantee.md", "docs/glossary.md"} <= named
    assert "mf_aggregators/kernel/sensitivity.py" in named


@pytest.mark.parametrize(
    "text",
    [
        "The run is 0.5-zCDP.",
        "rho of zero-concentrated DP is 1 / (2 sigma^2).",
        "Approximate numbers.\n\nIt is rho-zCDP.",
        "| approximate | x |\n| zCDP | rho |",
    ],
)
def test_claims_are_found(text: str) -> None:
    assert _claims(text)


@pytest.mark.parametrize("multiplier", [0.3, 1.0])
def test_no_statement_claims_pure_zcdp(multiplier: float) -> None:
    scheme = PoissonSampling(12, 3, 300, 10)
    for plan in (
        plan_of(identity(12), MinSeparation(3), 0.5 * multiplier, 1e-4),
        small_mechanisms.sampled(banded(workloads.prefix_sum(12), 3), scheme, multiplier, 1e-4),
    ):
        facts = small_mechanisms.facts(population=300, clients_per_round=10)
        text = Statement(facts, plan).to_markdown()
        # Sentence by sentence: a list has more than one.
        for sentence in re.split(r"(?<=\.) ", " ".join(text.split())):
            assert not _NAMED.search(sentence) or _MAY_SAY.search(sentence), sentence
        if plan.rho < float("inf"):
            assert re.search(r"approximate zCDP with rho = \S+ and delta0 = 1\S*e-15", text)
