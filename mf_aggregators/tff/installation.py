"""Advice for installing TensorFlow Federated if it is missing, because pip alone fails.

TFF runs on few machines. TFF 0.87 asks for a jaxlib that its registry has dropped, so the locked
packages are installed from a list, without resolving them again. The list lies next to this module,
also in a wheel.
"""

import pathlib
import shlex
import sys

_REQUIREMENTS = pathlib.Path(__file__).with_name("requirements-tff.txt")
# The packages of the extra ``tff`` that modules of this folder import.
PACKAGES = ("tensorflow_federated", "tensorflow_privacy", "tensorflow", "psutil")


def advice(package: str = PACKAGES[0]) -> str:
    """Returns a missing package's needs, and a command that installs it, in one line.

    In a clone of the repository, the command is another one.

    Args:
      package: The package's name; matplotlib, of the extra ``reports``, needs only pip.
    """
    if package == "matplotlib":
        return f"Type: {shlex.quote(sys.executable)} -m pip install matplotlib"
    # The command installs into this environment if its version of Python is supported by TFF.
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
    """Returns an import error with advice, or None if another package is missing.

    Args:
      what: The name of what was asked for, for the message.
      error: The error that the import raised.
    """
    missing = (error.name or "").partition(".")[0]
    if missing not in PACKAGES:
        return None
    return ModuleNotFoundError(
        f"{what} needs {missing}, which is not installed. {advice()}", name=error.name
    )
