"""Configuration of the site: `python3 quickstart.py docs` builds it.

Nothing is fetched: mathematics is set by MathJax from a package, and there are no links to the
inventories of other projects, because a build must not depend on a network.
"""

import atexit
import gc
import importlib.metadata
import logging
import os
import pathlib
import re
import shutil
import sys
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

from mf_aggregators.tff import processes

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

_HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))

project = "mf_aggregators"
author = "The mf_aggregators authors"
copyright = "the mf_aggregators authors, Apache License 2.0"
release = version = importlib.metadata.version("mf-aggregators")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "docs.extensions.command_pages",
    "docs.extensions.journeys",
    "docs.extensions.mechanism_pages",
    "docs.extensions.parallel_notebooks",
    "docs.extensions.reference_pages",
    "docs.extensions.site_figures",
    "docs.extensions.source_pages",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "extensions"]
language = "en"
highlight_language = "none"
# Smart quotes only turn two dashes into one; flags are code, and keep theirs.
smartquotes_action = "D"
nitpicky = True
# Names that other projects document: no warnings, though their inventories are not here to link to.
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|absl|argparse|asyncio|collections|contextlib|dataclasses|enum|os)\..*"),
    (r"py:.*", r"(dp_accounting|fractions|matplotlib|numpy|pathlib|scipy|tqdm|types|typing)\..*"),
    (r"py:.*", r"(tensorflow|tensorflow_federated|tensorflow_privacy|tff|tf|np|flags|plt)\..*"),
    (r"py:.*", r"[A-Za-z]*(Error|Warning|Exception)"),
]

# Notebook kernels have a profile of their own, and do not read the IPython configuration of the
# user who builds the site.
_IPYTHON = _HERE / "_build" / "ipython"
_STARTUP = """import logging

# Of tasks that a kernel leaves as it ends, after all cells have run.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
"""
os.environ["IPYTHONDIR"] = str(_IPYTHON)
(_IPYTHON / "profile_default" / "startup").mkdir(parents=True, exist_ok=True)
(_IPYTHON / "profile_default" / "startup" / "quiet.py").write_text(_STARTUP, encoding="utf-8")
# A build runs the notebooks unless NOTEBOOK_EXECUTION=off; they are kept without outputs.
nb_execution_mode = os.environ.get("NOTEBOOK_EXECUTION", "force")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
# With nb_execution_mode=off no kernel runs to say how cells are highlighted: suppress this warning.
suppress_warnings = ["myst-nb.lexer"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# The page of a class shows the docstrings of the class and of its constructor.
autoclass_content = "both"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"mf_aggregators {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Scripts of each page; versions.js lists the versions of a published site.
html_js_files = ["versions.js", "version-switch.js"]
# The copy button is on code, and not on printed output.
copybutton_selector = "div:not(.highlight-none, .highlight-text, .output) > div.highlight pre"
# The copy button copies the code of examples, without prompts and output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_search_scorer = str(_HERE / "_static" / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False
mathjax_path = "mathjax/tex-chtml.js"

_MARKERS_OF_TESTS = re.compile(r"^<!-- test:.*?-->\n", re.DOTALL | re.MULTILINE)
# Matches a signature of several lines, which Sphinx writes as a list of definitions without terms.
_PARAMETERS = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*</dd>\n)+)</dl>')
# Match texts that must not be broken at the end of a line: flags in text and in commands, if short
# enough for a phone, and powers of ten in text, not in tags.
_FLAG = re.compile(r'<span class="pre">(--[\w=.,:-]{1,28})</span>')
_COMMANDS = re.compile(r'<div class="highlight-bash.*?</pre>', re.DOTALL)
_FLAG_OF_COMMAND = re.compile(r"--\w{1,28}")
_POWER = re.compile(r"\d[\d.]*e-\d+(?![^<]*>)")
# Matches a formula in a line of text, with the punctuation after it.
_FORMULA = re.compile(r'<span class="math [^>]*>[^<]*</span>[.,;:)]+')
# Matches a table's cell with a number and its unit.
_WITH_UNIT = re.compile(r"(<td><p>\S?\d[\d.,]*) (\S{1,3}</p></td>)")
# Matches spaces between numbers and the signs ± and %; and code blocks, which stay unchanged.
_WITH_SIGN = re.compile(r"<pre.*?</pre>|(?<=\d) (?=[±%])|(?<=±) (?=\d)", re.DOTALL)
# Match names that are about as long as a line on a phone, and the places where they may be broken.
_LONG_NAME = re.compile(r'<span class="pre">[^<]{20,}</span>')
_SEAM = re.compile(r"(?<=\w[/._])(?=\w{3})")
# Matches a wide figure, which readers scroll on a phone.
_WIDE = re.compile(r'(<img alt="[^"]*" src="[^"]*\.png" />)')
# The files of MathJax that are copied into the site: the program and its fonts.
_MATHJAX = ("tex-chtml.js", "output/chtml/fonts/woff-v2")
# Replacements in pages that add labels for screen readers, which the theme's templates lack.
_LACKING = {
    '<aside class="sidebar-drawer': '<aside aria-label="All pages" class="sidebar-drawer',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
}


def _without_markers(app: "Sphinx", name: str, source: list[str]) -> None:
    """Removes from a page's source the comments that only tests read."""
    source[0] = _MARKERS_OF_TESTS.sub("", source[0])


def _parameters(found: re.Match[str]) -> str:
    lines = found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
    return f'<div class="parameters">\n{lines}</div>'


def _with_whole_flags(found: re.Match[str]) -> str:
    return _FLAG_OF_COMMAND.sub(r'<span class="unbroken">\g<0></span>', found[0])


def _make_accessible(
    app: "Sphinx",
    page: str,
    template: str,
    context: dict[str, str],
    document: "nodes.document | None",
) -> None:
    """Makes a page accessible: mends menus, scrolling, signatures and broken flags."""
    context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        body = body.replace('<table class="docutils', '<table tabindex="0" class="docutils')
        body = _WITH_UNIT.sub(r"\1&#160;\2", body)
        body = _WITH_SIGN.sub(lambda found: found[0] if found[0] != " " else "&#160;", body)
        body = _WIDE.sub(r'<span class="scrolls" tabindex="0">\1</span>', body)
        # The words in the summary name the button: its label is removed.
        body = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")
        body = _FLAG.sub(r'<span class="pre unbroken">\1</span>', body)
        body = _COMMANDS.sub(_with_whole_flags, body)
        body = _LONG_NAME.sub(lambda found: _SEAM.sub("<wbr>", found[0]), body)
        for each in (_POWER, _FORMULA):
            body = each.sub(r'<span class="unbroken">\g<0></span>', body)
        context["body"] = _PARAMETERS.sub(_parameters, body)


def _copy_mathjax(app: "Sphinx", failure: Exception | None) -> None:
    if failure is not None or app.builder.format != "html":
        return
    distribution = importlib.metadata.distribution("sphinx-mathjax-offline")
    source = pathlib.Path(str(distribution.locate_file("sphinx-mathjax-offline/static/mathjax")))
    target = pathlib.Path(app.outdir) / "_static" / "mathjax"
    for name in _MATHJAX:
        each = source / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if each.is_dir():
            shutil.copytree(each, target / name, dirs_exist_ok=True)
        else:
            shutil.copy(each, target / name)


def _mend_templates(app: "Sphinx", failure: Exception | None) -> None:
    if failure is not None or app.builder.format != "html":
        return
    for path in pathlib.Path(app.outdir).rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for found, mended in _LACKING.items():
            text = text.replace(found, mended)
        path.write_text(text, encoding="utf-8")


def _quiet_finalisers() -> None:
    """Silences an error of TensorFlow Federated at exit about a worker that it never started."""
    for each in gc.get_objects():
        if type(each).__name__ == "ServiceManager":
            type(each).__del__ = lambda self: None


def setup(app: "Sphinx") -> None:
    """Connects this file's functions to Sphinx."""
    atexit.register(_quiet_finalisers)
    # Do not log which kernel runs each notebook.
    logging.getLogger("traitlets").setLevel(logging.WARNING)
    processes.end_workers_at_exit()
    app.add_lexer("csv", TextLexer)
    app.connect("source-read", _without_markers)
    # Priority 900 runs after the theme, which makes the menu.
    app.connect("html-page-context", _make_accessible, priority=900)
    app.connect("build-finished", _copy_mathjax)
    app.connect("build-finished", _mend_templates)
