"""What a release consists of, and that its version is stated alike."""

import datetime
import json
import pathlib
import re
import sys
import tarfile
import zipfile
from typing import Any

import grimp
import pytest
import yaml
from packaging.version import Version

import mf_aggregators
import quickstart
from tests import console_commands
from tests.refusals import refuses
from tools import check_release


def _read(name: str) -> str:
    return (console_commands.ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_stated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    version = mf_aggregators.__version__
    assert check_release.version() == version
    (_, *sections) = re.findall(r"^## \[(.+)\](?: - (\S+))?$", _read("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(_read("CITATION.cff"))
    newest = (str(citation["version"]), str(citation["date-released"]))
    assert sections[0] == newest
    # Between releases, programs name the one that comes.
    released, own = map(Version, (newest[0], version))
    assert released < own if own.is_devrelease else released == own
    dates = [datetime.date.fromisoformat(date) for _, date in sections]
    assert dates == sorted(dates, reverse=True)
    monkeypatch.setattr(check_release, "version", lambda: newest[0])
    assert "### Security" in check_release.changes()
    assert f"[{sections[1][0]}]" not in check_release.changes()


# Archives


def _archives(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> check_release.Archives:
    """Archives of a small project, all of whose files are in both."""
    monkeypatch.setattr(check_release, "tracked", lambda: sorted(["setup.py", *files]))
    monkeypatch.setattr(check_release, "commands", lambda: ["mf-plan"])
    archives = check_release.Archives(folder / "a.whl", folder / "a.tar.gz")
    with zipfile.ZipFile(archives.wheel, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr("a.dist-info/entry_points.txt", "[console_scripts]\nmf-plan = a:run\n")
    with tarfile.open(archives.sources, "w:gz") as sources:
        for name in ["setup.py", "PKG-INFO", *files]:
            (folder / "file").write_text(files.get(name, ""))
            sources.add(folder / "file", f"a-1/{name}")
    return archives


def test_archives_that_lack_a_file_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"mf_aggregators/__init__.py": "", "mf_aggregators/py.typed": ""}
    archives = _archives(tmp_path, monkeypatch, files)
    check_release.check_contents(archives)
    more = [*files, "mf_aggregators/new.py"]
    for tracked, archive, file in (
        (["setup.py", *more], "a.whl", "mf_aggregators/new.py"),
        (["setup.py", *list(files)[:1]], "a.whl", "mf_aggregators/py.typed"),
        (["setup.py", "docs/page.md", *files], "a.tar.gz", "docs/page.md"),
    ):
        monkeypatch.setattr(check_release, "tracked", lambda tracked=tracked: tracked)
        with refuses(archive, file, error=check_release.ReleaseError):
            check_release.check_contents(archives)
    monkeypatch.setattr(check_release, "tracked", lambda: ["setup.py", *files])
    monkeypatch.setattr(check_release, "commands", lambda: ["mf-plan", "mf-report"])
    with refuses("mf-report", error=check_release.ReleaseError):
        check_release.check_contents(archives)


def test_the_bill_of_materials_has_the_locked_packages(tmp_path: pathlib.Path) -> None:
    path = check_release.write_bill_of_materials(quickstart.find_uv(), tmp_path)

    described = json.loads(path.read_text(encoding="utf-8"))
    listed = re.findall(r"^([\w.-]+)==([^ ;\n]+)", _read("requirements-tff.txt"), re.MULTILINE)
    assert len(listed) > 60
    found = {(each["name"], each["version"]) for each in described["components"]}
    assert found == set(listed)
    assert described["metadata"]["component"]["version"] == check_release.version()
    for each in described["components"]:
        assert any("hashes" in reference for reference in each["externalReferences"])


def test_what_is_published_is_signed_before() -> None:
    jobs = yaml.safe_load(_read(".github/workflows/release.yml"))["jobs"]
    uses = [step.get("uses", "") for step in jobs["provenance"]["steps"]]
    assert sum(each.startswith("actions/attest@") for each in uses) == 2
    assert "provenance" in jobs["registry"]["needs"]
    assert "registry" in jobs["page"]["needs"]


@pytest.mark.long
def test_a_release_holds_what_is_committed_and_runs(tmp_path: pathlib.Path) -> None:
    """Both archives, and the wheel in one fresh environment of this Python, without TensorFlow."""
    uv = quickstart.find_uv()
    archives = check_release.build(uv, tmp_path)
    check_release.check_contents(archives)
    environment = check_release.Environment(uv, sys.executable, tmp_path)
    environment.install(str(archives.wheel))
    found = environment.check_commands()
    assert any(name.startswith("rmse of mf-factorize") for name in found)
    environment.check_refusal()


# BUILD has every package and command, with what it imports.


_PACKAGES = ("mf_aggregators", "reproduction", "simulations", "stackoverflow_nwp")
# Import names whose distribution has another name, as a hub of rules_python spells it.
_DISTRIBUTIONS = {
    "absl": "absl_py",
    "google": "protobuf",
    "grpc": "grpcio",
    "sklearn": "scikit_learn",
}


def _rules() -> dict[str, dict[str, Any]]:
    """The rules of BUILD by name: its syntax is Python's."""
    found: dict[str, dict[str, Any]] = {}

    def rule(**values: Any) -> None:
        found[values["name"]] = values

    def other(*_: str, **also: object) -> None:
        pass

    names = {"load": other, "package": other, "py_library": rule, "py_binary": rule}
    exec((console_commands.ROOT / "BUILD").read_text(encoding="utf-8"), {**names, "glob": tuple})
    return found


@pytest.mark.parametrize("name", _PACKAGES)
def test_a_library_depends_on_what_it_imports(name: str) -> None:
    graph = grimp.build_graph(*_PACKAGES, include_external_packages=True)
    imported = {
        each.partition(".")[0]
        for module in graph.modules
        if module.partition(".")[0] == name
        for each in graph.find_modules_directly_imported_by(module)
    }
    expected = {
        f":{module}" if module in _PACKAGES else f"@pypi//{_DISTRIBUTIONS.get(module, module)}"
        for module in imported - set(sys.stdlib_module_names) - {name}
    }
    rule = _rules()[name]
    assert rule["srcs"] == (f"{name}/**/*.py",)
    assert rule["deps"] == sorted(expected)
    assert all((console_commands.ROOT / file).is_file() for file in rule.get("data", []))


def test_every_console_command_is_a_binary() -> None:
    binaries = {name: rule["main"] for name, rule in _rules().items() if "main" in rule}
    assert binaries == {
        name: entry.removesuffix(":run").replace(".", "/") + ".py"
        for name, entry in console_commands.of_setup()["commands"].items()
    }
