"""What a browser makes of a page, after its scripts."""

import pathlib
import shutil
import subprocess


def dom(page: pathlib.Path, user: pathlib.Path, link: str = "") -> str:
    """Returns the document of a page as Chromium has it once it is loaded.

    Args:
      page: The file.
      user: A folder for what the browser keeps.
      link: What follows the file in the address: ``#`` and a fragment.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "install Chromium (apt-get install chromium): nothing is skipped"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={user}")
    return subprocess.run(
        [browser, *flags, "--virtual-time-budget=1000000", "--dump-dom", page.as_uri() + link],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
