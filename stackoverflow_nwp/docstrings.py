"""Collects sentences from the docstrings of installed packages; each module is one client.

The packages are those that TensorFlow Federated and most other direct requirements of this project
need at run time, in the versions installed: what a lock file pins. Development tools, the
standard library and this project's own packages never count, nor does the order in which a file
system lists files, so that the sentences depend only on the lock file and the Python version.
Sources are parsed and never imported.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

from mf_aggregators.progress_bars import ProgressBar
from stackoverflow_nwp import text_cleaning
from stackoverflow_nwp.federated_text import Example, split_of_client

# Docstrings of these packages are read, and of all that their metadata name.
ROOT_PACKAGES = (
    "absl-py",
    "dp-accounting",
    "matplotlib",
    "numpy",
    "psutil",
    "scipy",
    "tensorboard",
    "tensorflow",
    "tensorflow-federated",
    "tensorflow-privacy",
    "tqdm",
)

MIN_SENTENCES_PER_CLIENT = 10
# Sentences of one client are limited: otherwise a few modules with thousands of generated sentences
# would outweigh all others.
MAX_SENTENCES_PER_CLIENT = 512

# A part of the cache key, to be raised when a change of this code changes the sentences.
CLEANING_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed distribution and its Python sources.

    Attributes:
        name: Its normalised name, as a lock file spells it.
        version: The installed version of the package.
        modules: Its modules' dotted names with their source files, sorted by name.
    """

    name: str
    version: str
    modules: tuple[tuple[str, pathlib.Path], ...]


@dataclasses.dataclass(frozen=True)
class Sentence:
    """Sentence of a docstring, as tokens joined by spaces, with the class or function documented.

    The name is "" for the module's own docstring.
    """

    tokens: str
    qualified_name: str
    is_function: bool


def normalized_name(name: str) -> str:
    """Returns a package's name as in lock files: in lower case, "-" for runs of ".", "-", "_"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_packages(
    search_path: Sequence[str] | None = None,
    root_packages: Sequence[str] = ROOT_PACKAGES,
    lock_file: pathlib.Path | None = None,
) -> tuple[Package, ...]:
    """Finds the root packages and all installed packages that they require, sorted by name.

    A requirement that is not installed (one that the lock overrides away) is passed over.

    Args:
        search_path: Directories of installed distributions; `sys.path` if None.
        root_packages: Names of the packages to start from.
        lock_file: A `uv.lock`. Packages that it does not name are left out, as if they were not
            installed. By default the one in the root of this project's checkout, if there.
    """
    lock_file = lock_file or pathlib.Path(__file__).resolve().parent.parent / "uv.lock"
    locked_names = _locked_names(lock_file)
    installed: dict[str, importlib.metadata.Distribution] = {}
    directories = list(sys.path if search_path is None else search_path)
    for distribution in importlib.metadata.distributions(path=directories):
        name = distribution.metadata["Name"]
        # Keep the first distribution of a name on the search path, as an import does.
        if name and (locked_names is None or normalized_name(name) in locked_names):
            installed.setdefault(normalized_name(name), distribution)
    found: set[tuple[str, str]] = set()
    queue = [(normalized_name(name), "") for name in root_packages]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in found or name not in installed:
            continue
        found.add((name, extra))
        queue.extend(_requirements(installed[name], extra))
    return tuple(
        Package(name, installed[name].version, _modules(installed[name]))
        for name in sorted({name for name, _ in found})
    )


def fingerprint(packages: Sequence[Package]) -> str:
    """Returns a fingerprint of the sentences of some packages: twelve hexadecimal digits.

    The fingerprint depends on the packages' names and versions, on the Python version, whose
    grammar reads the sources, and on this module's rules.
    """
    lines = [f"{package.name}=={package.version}" for package in packages]
    lines.append(f"python {sys.version_info.major}.{sys.version_info.minor}")
    lines.append(
        f"{CLEANING_VERSION} {MIN_SENTENCES_PER_CLIENT} {MAX_SENTENCES_PER_CLIENT}"
        f" {text_cleaning.MIN_WORDS} {text_cleaning.MAX_TOKENS}"
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def sentences_of_module(source: bytes) -> list[Sentence]:
    """Returns the sentences of a module's docstrings, nested ones too, in the order of the source.

    Raises:
        SyntaxError: The source is not valid Python.
        ValueError: The source holds null bytes.
    """
    with warnings.catch_warnings():
        # Ignore warnings of invalid escape sequences in the packages' sources.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    sentences: list[Sentence] = []
    _collect(tree, "", sentences)
    return sentences


def examples(
    packages: Sequence[Package],
    found: list[int] | None = None,
    max_sentences: int = MAX_SENTENCES_PER_CLIENT,
    show_progress: bool = True,
) -> Iterator[Example]:
    """Yields the sentences of some packages, one client per module.

    Modules come in the order of their names, and a sentence is kept only for the first module that
    has it. `tags` is the package's name, `title` the class or function whose docstring it is from
    (the module where it is the module's), `post_type` is "answer" for functions and methods and
    "question" for modules and classes.

    Args:
        packages: The result of `find_packages`.
        found: Takes the number of sentences of each module, duplicates included.
        max_sentences: The most sentences of a module: of one with more, the first are kept.
        show_progress: Whether to draw a progress bar on standard error.
    """
    sources: dict[str, tuple[pathlib.Path, str]] = {}
    for package in packages:
        for module, path in package.modules:
            sources.setdefault(module, (path, package.name))
    seen: set[str] = set()
    progress = ProgressBar(
        sorted(sources), desc="Reading docstrings", unit="module", disable=not show_progress
    )
    for module in progress:
        path, package_name = sources[module]
        try:
            sentences = sentences_of_module(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue
        if found is not None:
            found.append(len(sentences))
        unique = []
        for sentence in sentences:
            if sentence.tokens not in seen:
                seen.add(sentence.tokens)
                unique.append(sentence)
        if len(unique) < MIN_SENTENCES_PER_CLIENT:
            continue
        split = split_of_client(module)
        for sentence in unique[:max_sentences]:
            yield Example(
                client_id=module,
                split=split,
                tokens=sentence.tokens,
                tags=package_name,
                title=sentence.qualified_name or module,
                post_type="answer" if sentence.is_function else "question",
            )


def _locked_names(lock_file: pathlib.Path) -> frozenset[str] | None:
    """Returns the package names in a uv.lock; None if there is no such file."""
    try:
        text = lock_file.read_text(encoding="utf-8")
    except OSError:
        return None
    # Read the lock with a regular expression, because Python 3.10 has no tomllib. The layout is
    # fixed: each package is a table with its name as the first key.
    names = re.findall(r'^\[\[package\]\]\nname = "([^"]+)"', text, re.MULTILINE)
    return frozenset(normalized_name(name) for name in names)


def _requirements(
    distribution: importlib.metadata.Distribution, extra: str
) -> Iterator[tuple[str, str]]:
    """Yields name and extra of each package that a distribution requires here."""
    # The package packaging is always there: matplotlib requires it.
    from packaging import requirements

    for text in distribution.requires or ():
        requirement = requirements.Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = normalized_name(requirement.name)
            yield name, ""
            for required_extra in sorted(requirement.extras):
                yield name, required_extra


def _modules(
    distribution: importlib.metadata.Distribution,
) -> tuple[tuple[str, pathlib.Path], ...]:
    """Returns a distribution's Python modules, from the record of its installed files."""
    modules = {}
    for file in distribution.files or ():
        # Skip files that are no modules: scripts outside the package, as "../../../bin/...", and
        # templates.
        if file.suffix != ".py" or not all(part.isidentifier() for part in file.parts[:-1]):
            continue
        parts = file.parts[:-1] if file.stem == "__init__" else (*file.parts[:-1], file.stem)
        path = pathlib.Path(str(distribution.locate_file(file)))
        if parts and parts[-1].isidentifier() and path.is_file():
            modules[".".join(parts)] = path
    return tuple(sorted(modules.items()))


def _collect(node: ast.AST, prefix: str, sentences: list[Sentence]) -> None:
    """Appends the sentences of a syntax node's docstring, then those of nodes within it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node, clean=False)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for tokens in text_cleaning.sentences_of_docstring(docstring) if docstring else ():
            sentences.append(Sentence(" ".join(tokens), prefix, is_function))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            _collect(child, name, sentences)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            # Go into statements such as "if" and "try", which may contain definitions.
            _collect(child, prefix, sentences)
