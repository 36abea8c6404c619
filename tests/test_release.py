"""What a release consists of, and that its version is stated alike."""

import datetime
import json
import pathlib
import re
import sys
import tarfile
import zipfile

import pytest
import yaml

import mf_aggregators
import quickstart
from tests import console_commands
from tests.refusals import refuses
from tools import check_release


def _read(name: str) -> str:
    return (console_commands.ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_stated_alike() -> None:
    version = mf_aggregators.__version__
    assert check_release.version() == version
    (_, *sections) = re.findall(r"^## \[(.+)\](?: - (\S+))?$", _read("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(_read("CITATION.cff"))
    newest = (str(citation["version"]), str(citation["date-released"]))
    assert sections[0] == newest
    assert newest[0] == version
    dates = [datetime.date.fromisoformat(date) for _, date in sections]
    assert dates == sorted(dates, reverse=True)
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
