"""Set-up and tests: quickstart.py, .ci/run, requirements-tff.txt, README.md."""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import zipfile

import pytest

from tests.refusals import refuses

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _load_quickstart() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quickstart(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """quickstart.py, working in an empty folder and never running pip."""
    module = _load_quickstart()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "pip_download", lambda folder: None)
    return module


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "quickstart.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", [(), ("setup",)])
def test_help_is_printed_and_nothing_is_set_up(command: tuple[str, ...]) -> None:
    ended = _run(*command, "--help")
    assert ended.returncode == 0
    assert "python3 quickstart.py train" in ended.stdout
    assert not ended.stderr


# requirements-tff.txt


def test_requirements_are_in_step_with_the_lock() -> None:
    """The head of the list says how it is made."""
    lines = (ROOT / "requirements-tff.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (command,) = (line for line in lines if line.startswith("#   uv export"))
    uv = _load_quickstart().find_uv()
    made = subprocess.run(
        [uv, *command.split()[2:]], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert "tensorflow-federated==0.87.0 ;" in made.stdout
    assert "".join(line for line in lines if line[:1] != "#") == made.stdout


# quickstart.py


@pytest.mark.parametrize("arguments", [[], ["tran"], ["setup", "now"]])
def test_a_wrong_command_ends_with_one_line(arguments: list[str]) -> None:
    done = _run(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("quickstart: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [
        ("Darwin", "arm64", None),
        ("Linux", "aarch64", "glibc 2.36"),
        ("Linux", "x86_64", "glibc 2.28"),
    ],
)
def test_machines_without_tff_are_refused(
    quickstart: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: str,
    machine: str,
    libc: str | None,
) -> None:
    uname = types.SimpleNamespace(sysname=system, machine=machine)
    monkeypatch.setattr(quickstart.os, "uname", lambda: uname)
    monkeypatch.setattr(quickstart.os, "confstr", lambda name: libc)

    with pytest.raises(SystemExit) as ended:
        quickstart.main(["train"])

    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_is_refused(
    quickstart: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = types.SimpleNamespace(free=2e9)
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda path: usage)

    with refuses("3.5 GB", "2.0 GB", error=quickstart.SetupError):
        quickstart.check_disk()

    (quickstart.VENV / "lib/python3.11/site-packages/tensorflow_federated").mkdir(parents=True)
    quickstart.check_disk()


def _publish_wheel(quickstart: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Puts a wheel with a small script for uv where the lock in quickstart.ROOT points to."""
    wheel = quickstart.ROOT / "index/packages" / quickstart.UV_WHEEL_PATH
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        script = f"#!/bin/sh\necho uv {quickstart.UV_VERSION}\n"
        archive.writestr(f"uv-{quickstart.UV_VERSION}.data/scripts/uv", script)
    lock = f'    {{ url = "file://{quickstart.ROOT}/index/packages/aa/six.whl", hash = "" }},\n'
    (quickstart.ROOT / "uv.lock").write_text(lock)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(quickstart, "UV_WHEEL_SHA256", digest)
    return wheel


def test_uv_is_downloaded_once_where_there_is_no_pip(
    quickstart: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _publish_wheel(quickstart, monkeypatch)

    uv = quickstart.fetch_uv()

    assert uv == str(quickstart.ROOT / ".uv" / quickstart.UV_VERSION / "uv")
    assert quickstart.uv_version(uv) == (0, 13, 8)
    assert os.listdir(os.path.dirname(uv)) == ["uv"]
    wheel.unlink()
    assert quickstart.fetch_uv() == uv


def test_another_file_than_the_pinned_one_is_refused(
    quickstart: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _publish_wheel(quickstart, monkeypatch)
    with wheel.open("ab") as file:
        file.write(b"altered")

    with refuses("pinned", error=quickstart.SetupError):
        quickstart.fetch_uv()
    wheel.unlink()
    with refuses("download", error=quickstart.SetupError):
        quickstart.fetch_uv()


def test_a_worker_left_behind_by_the_tests_is_ended(
    quickstart: types.ModuleType, tmp_path: pathlib.Path
) -> None:
    worker = tmp_path / "worker_binary"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", worker)
    ours = subprocess.Popen([str(worker), "60"], env={"MARK": "1.5"})
    other = subprocess.Popen([str(worker), "60"], env={"MARK": "2.5"})
    try:
        quickstart._end_workers("MARK=1.5")

        assert ours.wait(timeout=120) < 0
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


# Parts of the long test


def test_the_parts_of_the_long_test_have_each_test_once() -> None:
    parts = _load_quickstart().PARTS_OF_LONG_TEST
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")}
    tested: list[str] = []
    for part in parts:
        ignored = tuple(f"{each.partition('=')[2]}/" for each in part if each.startswith("--"))
        folders = tuple(f"{each}/" for each in part if not each.startswith("--"))
        tested += [
            each for each in files if each.startswith(folders) and not each.startswith(ignored)
        ]
    assert sorted(tested) == sorted(files)


# README.md and .ci/run


def _quick_start() -> list[list[str]]:
    """The lines of the bash blocks in README.md's section Quick start."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Quick start\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    blocks = re.findall(r"^```bash\n(.*?)^```", section.group(1), re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in blocks]


def test_readme_starts_with_two_commands() -> None:
    first, second = _quick_start()[:2]

    assert len(first) == len(second) == 1
    assert first[0].split()[:3] == ["python3", "quickstart.py", "train"]
    assert second[0].split()[:3] == ["python3", "quickstart.py", "test"]


def _ci_run(folder: pathlib.Path, readme: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "README.md").write_text(readme)
    return subprocess.run([folder / ".ci/run"], capture_output=True, text=True, check=False)


def test_ci_runs_the_second_command_of_the_readme(tmp_path: pathlib.Path) -> None:
    done = _ci_run(
        tmp_path,
        "# x\n## Before\n```bash\nexit 7\n```\n## Quick start\n```bash\nexit 8\n```\ntext\n"
        '```bash\necho "CI is $CI in $PWD"; exit 9\n```\n## After\n```bash\nexit 10\n```\n',
    )

    assert done.returncode == 9
    assert done.stdout == f"CI is true in {tmp_path}\n"
