"""Advice where TensorFlow Federated is missing: it runs on few machines, and pip alone fails.

TFF 0.87 asks for a jaxlib that its registry has dropped, so the locked packages are installed from
a list, without resolving them again. The list lies beside this module, also in a wheel.
"""

import importlib.util
import pathlib
import platform
import shlex
import sys

_REQUIREMENTS = pathlib.Path(__file__).with_name("requirements-tff.txt")
# The packages of the extra ``tff`` that no module of this folder does without.
PACKAGES = ("tensorflow_federated", "tensorflow_privacy", "tensorflow", "psutil")
# The packages of the extra ``reports``, which draws figures and writes pages.
_REPORTS = ("markdown", "matplotlib")

_PYTHONS = ((3, 10), (3, 11))


def advice(package: str = PACKAGES[0]) -> str:
    """Returns the needs of a missing package and a command, for this Python and this machine.

    The text is one line. A clone of the repository has a command of its own; everybody else gets
    pip's, or uv's for an environment without pip.

    Args:
      package: Its name; one of the extra ``reports`` needs no more than pip.
    """
    if package in _REPORTS:
        return f"Type: {_installer()} {' '.join(_REPORTS)}"
    needs = "TensorFlow Federated 0.87 needs Python 3.10 or 3.11 on Linux (x86-64)"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return (
            f"{needs}, and this is {platform.system()} ({platform.machine()}): use such a machine."
        )
    clone = pathlib.Path(__file__).parents[2]
    if (clone / "quickstart.py").is_file():
        folder = shlex.quote(str(clone))
        return (
            f"{needs}. Type: cd {folder} && python3 quickstart.py setup; then use "
            f"{shlex.quote(str(clone / '.venv/bin/python'))}."
        )
    listed = f"--no-deps -r {shlex.quote(str(_REQUIREMENTS))}"
    if sys.version_info[:2] in _PYTHONS:
        return f"{needs}. Type: {_installer()} {listed}"
    found = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{needs}, and this is Python {found}. Type, with such a Python: "
        f"python3.11 -m venv tff && tff/bin/pip install {listed}; then install this package there."
    )


def explained(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError | None:
    """Returns an error with the advice, or None if another package is missing.

    Args:
      what: What was asked for, for the message.
      error: What its import raised.
    """
    missing = (error.name or "").partition(".")[0]
    if missing not in PACKAGES:
        return None
    return ModuleNotFoundError(
        f"{what} needs {missing}, which is not installed. {advice()}", name=error.name
    )


def _installer() -> str:
    """The beginning of a command that installs into this environment."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip install"
    return f"uv pip install --python {python}"
