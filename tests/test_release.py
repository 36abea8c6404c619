"""What a release consists of, and what the workflows of the repository's host would run."""

import datetime
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import mf_aggregators
import quickstart
from tests import documents
from tools import check_release

ROOT = documents.ROOT
_WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Documents beside the pages of docs/, whose commands are those of who changes the code.
_DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Programs that are not this project's, which runners have.
_OF_RUNNERS = ("gh",)


# Commands


def _make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", text, re.MULTILINE))


def _check_command(line: str, where: str) -> None:
    """Fails unless a command of this repository is there, and takes its arguments."""
    program, *arguments = shlex.split(line)
    if program == "make":
        assert arguments, where
        assert set(arguments) <= _make_targets(), f"{where}: {line}"
    elif program == "bash":
        (script,) = arguments
        assert os.access(ROOT / script, os.X_OK), f"{where}: {line}"
    elif program == "python3" and arguments[0] == "quickstart.py":
        assert arguments[1] in ("train", "test", "setup", "docs"), f"{where}: {line}"
        assert f'"{arguments[1]}"' in (ROOT / "quickstart.py").read_text(), f"{where}: {line}"
        for argument in arguments[2:]:
            is_option = argument == "--all" or argument.startswith("--cov")
            assert is_option or (ROOT / argument).exists(), f"{where}: {line}"
    elif program == "python3" and arguments[:2] == ["-m", "tools.check_release"]:
        options = check_release.parser().parse_args(arguments[2:])
        assert set(options.federated.split(",")) <= {"", *quickstart.PYTHONS}, line
    elif (program == "python3" and arguments[:2] == ["-m", "venv"]) or program == "uv/bin/pip":
        # The uv that everything else uses.
        assert arguments[-1] in ("uv", f"uv=={quickstart.UV_VERSION}"), f"{where}: {line}"
    else:
        assert program in (*_OF_RUNNERS, "uv/bin/uv"), f"{where}: what is {line}?"


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "python3 quickstart.py tests",
        "python3 quickstart.py test tests/nowhere",
        "bash .ci/nothing",
        "python3 -m tools.check_release --federated=3.12",
        "uv/bin/pip install uv==0.0.1",
        "curl elsewhere",
    ],
)
def test_a_command_that_is_not_there_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        _check_command(line, "a workflow")


@pytest.mark.parametrize("name", _DOCUMENTS)
def test_documents_name_commands_and_files_that_are_there(name: str) -> None:
    text = documents.read(name)
    assert not documents.over_long_lines(text)
    for block in documents.blocks(name, text):
        for command in block.commands():
            _check_command(shlex.join(command.words), block.where)
    prose = documents.without_blocks(text)
    for target in re.findall(r"\]\((?!https://)([^)#]+)", prose):
        assert (ROOT / target).exists(), f"{name}: {target}"
    for code in re.findall(r"`([^`]+)`", prose):
        if code.startswith(("python3 ", "make ")):
            _check_command(" ".join(code.split()), name)
        elif re.fullmatch(r"[\w./-]+\.(py|md|cff|yml|toml)", code):
            folders = (ROOT, ROOT / "mf_aggregators", ROOT / "mf_aggregators" / "factorizations")
            assert any((folder / code).is_file() for folder in folders), f"{name}: {code}"


# Workflows. Their permissions, pins and expressions are zizmor's matter.


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each job with its place."""
    for path in _WORKFLOWS:
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            assert {*([needs] if isinstance(needs, str) else needs)} <= set(jobs), path.name
            yield f"{path.name}, {name}", job


def test_workflows_run_commands_that_are_there() -> None:
    ran = [
        (where, line)
        for where, job in _jobs()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]
    for where, line in ran:
        _check_command(line, where)
    for file, command in (
        ("tests.yml", "bash .ci/run"),
        ("nightly.yml", "python3 quickstart.py test --all"),
        ("nightly.yml", "python3 -m tools.check_release"),
        ("release.yml", '--tag="$GITHUB_REF_NAME"'),
    ):
        assert any(where.startswith(file) and command in line for where, line in ran), command


@pytest.mark.parametrize(
    ("before", "after"),
    [("@[0-9a-f]{40}", "@v4"), ("persist-credentials: false", ""), ("contents: read", "write-all")],
)
def test_a_workflow_that_may_do_too_much_is_found(
    before: str, after: str, tmp_path: pathlib.Path
) -> None:
    (program,) = (check for check in quickstart.CHECKS if check[0] == "zizmor")
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    for contents, status in ((text, True), (re.sub(before, after, text), False)):
        (folder / "tests.yml").write_text(contents)
        command = [str(pathlib.Path(sys.executable).with_name("zizmor")), *program[1:]]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        assert (ended.returncode == 0) == status


def test_pythons_of_workflows_are_those_that_are_claimed() -> None:
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _read("setup.py"))
    assert check_release.parser().parse_args([]).pythons.split(",") == claimed
    assert check_release.parser().parse_args([]).federated.split(",") == sorted(quickstart.PYTHONS)
    for where, job in _jobs():
        for step in job["steps"]:
            if "check_release" in step.get("run", ""):
                (given,) = (
                    each["with"]["python-version"].split()
                    for each in job["steps"]
                    if "setup-python" in each.get("uses", "")
                )
                assert given == claimed, where


# The version


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_stated_alike() -> None:
    version = mf_aggregators.__version__
    assert check_release.version() == version
    citation = yaml.safe_load(_read("CITATION.cff"))
    assert str(citation["version"]) == version
    sections = re.findall(r"^## \[(.+)\](?: - (\S+))?$", _read("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    versions = [name for name, _ in sections[1:]]
    assert versions[0] == version
    parts = [tuple(map(int, name.split("."))) for name in versions]
    assert parts == sorted(parts, reverse=True)
    dates = [datetime.date.fromisoformat(date) for _, date in sections[1:]]
    assert dates == sorted(dates, reverse=True)
    assert citation["date-released"] == dates[0].isoformat()
    kinds = set(re.findall(r"^### (.+)$", _read("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert "### Security" in check_release.changes()
    assert "[0.5.0]" not in check_release.changes()


def test_a_tag_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_release.main(["--tag=v0.0.1", "--pythons=", "--federated="]) == 1
    assert "the tag is v0.0.1" in capsys.readouterr().err


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
    for tracked, message in (
        (["setup.py", *more], "a.whl lacks .*new.py"),
        (["setup.py", *list(files)[:1]], "a.whl .*py.typed.* not expected"),
        (["setup.py", "docs/page.md", *files], "a.tar.gz lacks .*page.md"),
    ):
        monkeypatch.setattr(check_release, "tracked", lambda tracked=tracked: tracked)
        with pytest.raises(check_release.ReleaseError, match=message):
            check_release.check_contents(archives)
    monkeypatch.setattr(check_release, "tracked", lambda: ["setup.py", *files])
    monkeypatch.setattr(check_release, "commands", lambda: ["mf-plan", "mf-report"])
    with pytest.raises(check_release.ReleaseError, match=r"lacks .*mf-report"):
        check_release.check_contents(archives)


def test_the_commands_of_a_release_are_those_of_setup() -> None:
    scripts = re.findall(r'^    "([\w-]+)=[\w.]+:run",$', _read("setup.py"), re.MULTILINE)
    assert check_release.commands() == sorted(scripts)
    assert len(scripts) == 11


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
