"""Pages of the site that are generated before each build."""

import pathlib
from collections.abc import Mapping


def write(directory: pathlib.Path, texts: Mapping[str, str], suffix: str) -> None:
    """Writes pages where they changed, and removes those that there are no texts of.

    Args:
      directory: Where to; made if it is not there.
      texts: The pages by the names of their files.
      suffix: That of all these files, as in ``.md``.
    """
    directory.mkdir(exist_ok=True)
    for path in directory.glob(f"*{suffix}"):
        if path.name not in texts:
            path.unlink()
    for name, content in texts.items():
        path = directory / name
        # Sphinx reads pages again that are newer than its last build.
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
