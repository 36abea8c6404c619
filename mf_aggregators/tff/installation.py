"""Advice where TensorFlow Federated is missing: it runs on few machines, and pip alone fails.

TFF 0.87 asks for a jaxlib that its registry has dropped, so the locked packages are installed from
a list, without resolving them again. The list lies beside this module, also in a wheel.
"""

import pathlib
import shlex
import sys

_REQUIREMENTS = pathlib.Path(__file__).with_name("requirements-tff.txt")
# The packages of the extra ``tff`` that no module of this folder does without.
PACKAGES = ("tensorflow_federated", "tensorflow_privacy", "tensorflow", "psutil")


def advice(package: str = PACKAGES[0]) -> str:
    """Returns the needs of a missing package and a command that installs it, in one line.

    A clone of the repository has a command of its own.

    Args:
      package: Its name; matplotlib, of the extra ``reports``, needs no more than pip.
    """
    if package == "matplotlib":
        return f"Type: {shlex.quote(sys.executable)} -m pip install matplotlib"
    # Into this environment, if its Python is one that will do.
    own = sys.executable if sys.version_info[:2] in ((3, 10), (3, 11)) else "python3.11"
    listed = shlex.quote(str(_REQUIREMENTS))
    command = f"{shlex.quote(own)} -m pip install --no-deps -r {listed}"
    clone = pathlib.Path(__file__).parents[2]
    if (clone / "quickstart.py").is_file():
        python = shlex.quote(str(clone / ".venv/bin/python"))
        folder = shlex.quote(str(clone))
        command = f"cd {folder} && python3 quickstart.py setup; then use {python}."
    return (
        "TensorFlow Federated 0.87 needs Python 3.10 or 3.11 on Linux (x86-64), and this is Python "
        f"{sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}. Type: {command}"
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
