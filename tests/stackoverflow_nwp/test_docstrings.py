"""Tests of docstrings, on a small tree in the place of site-packages."""

import pathlib
from collections.abc import Sequence

import pytest

from stackoverflow_nwp import docstrings, federated_text

_NUMBERS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)


def _sentences(topic: str, number: int = 12) -> str:
    return " ".join(f"The {topic} has {word} good parts." for word in _NUMBERS[:number])


def _install(
    site_packages: pathlib.Path,
    name: str,
    version: str,
    modules: dict[str, str],
    requires: Sequence[str] = (),
) -> None:
    """Writes a distribution as an installer does."""
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(metadata) + "\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in (*modules, "../../bin/run.py")))
    for path, source in modules.items():
        file = site_packages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)


@pytest.fixture
def site_packages(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "site-packages"
    _install(
        directory,
        "Root.Package",
        "1.0",
        {
            "root/__init__.py": f'"""{_sentences("root")}"""\n',
            "root/thing.py": (
                f'class Thing:\n    """{_sentences("thing")}"""\n'
                '    def use(self):\n        """Uses the thing for good. The root has one good'
                ' parts."""\n'
                'if True:\n    async def inner():\n        """Waits for the other one."""\n'
            ),
            "root/few.py": f'"""{_sentences("few", 9)}"""\n',
            "root/broken.py": "def (:\n",
            "root/copy.py": f'"""{_sentences("root")}"""\n',
        },
        ["needed>=1", "absent", "optional; extra == 'more'", "with-extra[fast]"],
    )
    _install(directory, "needed", "2.0", {"needed.py": f'"""{_sentences("need")}"""\n'})
    _install(directory, "optional", "1", {"optional.py": f'"""{_sentences("option")}"""\n'})
    _install(
        directory,
        "with-extra",
        "3",
        {"with_extra.py": f'"""{_sentences("extra")}"""\n'},
        ["faster; extra == 'fast'", "never; python_version < '3'", "root_package"],
    )
    _install(directory, "faster", "4", {"faster.py": f'"""{_sentences("speed")}"""\n'})
    _install(directory, "dev-tool", "5", {"dev_tool.py": f'"""{_sentences("tool")}"""\n'})
    return directory


def _find(
    site_packages: pathlib.Path, lock_file: pathlib.Path | None = None
) -> tuple[docstrings.Package, ...]:
    return docstrings.find_packages(
        [str(site_packages)], ["root-package"], lock_file or site_packages / "no-such-lock"
    )


def test_packages_are_what_the_roots_require(site_packages: pathlib.Path) -> None:
    packages = _find(site_packages)
    assert [(package.name, package.version) for package in packages] == [
        ("faster", "4"),
        ("needed", "2.0"),
        ("root-package", "1.0"),
        ("with-extra", "3"),
    ]
    assert [module for module, _ in packages[2].modules] == [
        "root",
        "root.broken",
        "root.copy",
        "root.few",
        "root.thing",
    ]


def test_examples(site_packages: pathlib.Path) -> None:
    found: list[int] = []
    examples = list(docstrings.examples(_find(site_packages), found, show_progress=False))
    by_client: dict[str, list[federated_text.Example]] = {}
    for example in examples:
        by_client.setdefault(example.client_id, []).append(example)
    # root.copy only repeats, root.few has too few, root.broken is not Python.
    assert {client: len(own) for client, own in by_client.items()} == {
        "faster": 12,
        "needed": 12,
        "root": 12,
        "root.thing": 14,
        "with_extra": 12,
    }
    # root.copy repeats all of root's, and a method one of them.
    assert sum(found) == 5 * 12 + 12 + 3 + 9
    texts = [example.tokens for example in examples]
    assert len(set(texts)) == len(texts)
    method, function = by_client["root.thing"][12:]
    assert (method.tokens, method.title, method.post_type, method.tags) == (
        "uses the thing for good .",
        "Thing.use",
        "answer",
        "root-package",
    )
    assert (function.tokens, function.title) == ("waits for the other one .", "inner")
    assert by_client["root"][0].title == "root"
    assert by_client["root"][0].post_type == "question"


def test_fingerprint_follows_versions(site_packages: pathlib.Path) -> None:
    before = docstrings.fingerprint(_find(site_packages))
    assert before == docstrings.fingerprint(_find(site_packages))
    info = site_packages / "needed-2.0.dist-info"
    metadata = (info / "METADATA").read_text().replace("2.0", "2.1")
    (info / "METADATA").write_text(metadata)
    info.rename(site_packages / "needed-2.1.dist-info")
    assert docstrings.fingerprint(_find(site_packages)) != before
