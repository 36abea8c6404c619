"""Writes pages of the site that are generated before each build."""

import pathlib
from collections.abc import Mapping


def write(directory: pathlib.Path, texts: Mapping[str, str], suffix: str) -> None:
    """Writes pages with changed text, and removes pages that are not generated any more.

    Args:
      directory: Where pages go; created if it is missing.
      texts: The pages by the names of their files.
      suffix: The ending of all these files' names, as ``.md``.
    """
    directory.mkdir(exist_ok=True)
    for path in directory.glob(f"*{suffix}"):
        if path.name not in texts:
            path.unlink()
    for name, content in texts.items():
        path = directory / name
        # Unchanged pages are not written, because Sphinx reads pages again that are newer than its
        # last build.
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
