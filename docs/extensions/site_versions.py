"""Puts the sites of released versions into folders of the latest one, and links all of them.

    python -m docs.extensions.site_versions docs/_build/html released

``released`` has a folder for each release, named as its tag, with the archive of the site that
``.github/workflows/release.yml`` attached to it. The newest of each minor version goes into a
folder of the site: that of 2.0.3 into ``2.0/``. Every site gets a list of all of them, relative to
itself, which ``docs/_static/version-switch.js`` shows.
"""

import json
import pathlib
import re
import shutil
import sys
import tarfile
import tempfile

ARCHIVE = "mf_aggregators-site.tar.gz"
# The folder of the site in an archive, and the file in a site with the list of versions.
_IN_ARCHIVE = "html"
_LIST = pathlib.PurePath("_static", "versions.js")
_LATEST = "latest"
# Matches tags of releases; versions with other tags, as candidates, are not on the site.
_TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def put_beside(site: pathlib.Path, released: pathlib.Path) -> list[str]:
    """Unpacks the sites of releases into folders of the latest site, and lists all versions.

    Args:
      site: The folder of the latest site, which is changed.
      released: The folder of the archives.

    Returns:
      The names of the folders, the newest first.

    Raises:
      ValueError: If an archive has no site or something else, or the latest site has a folder of
        such a name.
    """
    newest: dict[tuple[int, int], tuple[int, pathlib.Path]] = {}
    for archive in released.glob(f"*/{ARCHIVE}"):
        match = _TAG.fullmatch(archive.parent.name)
        if match is not None:
            major, minor, patch = map(int, match.groups())
            newest[major, minor] = max((patch, archive), newest.get((major, minor), (-1, archive)))
    names = []
    for (major, minor), (_, archive) in sorted(newest.items(), reverse=True):
        name = f"{major}.{minor}"
        if (site / name).exists():
            raise ValueError(f"{site / name} is there already.")
        with tempfile.TemporaryDirectory(dir=released) as folder, tarfile.open(archive) as packed:
            _check_members(archive, packed)
            packed.extractall(folder)
            unpacked = pathlib.Path(folder, _IN_ARCHIVE)
            if not (unpacked / "index.html").is_file():
                raise ValueError(f"{archive} has no {_IN_ARCHIVE}/index.html.")
            shutil.move(unpacked, site / name)
        names.append(name)
    _write_list(site, {_LATEST: "./", **{name: f"{name}/" for name in names}})
    for name in names:
        below = {other: f"../{other}/" for other in names if other != name}
        paths = {_LATEST: "../", **below, name: "./"}
        _write_list(site / name, {each: paths[each] for each in (_LATEST, *names)})
    return names


def _check_members(archive: pathlib.Path, packed: tarfile.TarFile) -> None:
    """Raises ValueError if an archive has anything but files and folders below its own root.

    Python's own filter for archives came with 3.10.12 and 3.11.4, and Debian 12 has 3.11.2.
    """
    for member in packed.getmembers():
        path = pathlib.PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise ValueError(f"{archive} has {member.name}, which is no file below {_IN_ARCHIVE}.")


def _write_list(site: pathlib.Path, paths: dict[str, str]) -> None:
    versions = [{"name": name, "path": path} for name, path in paths.items()]
    file = site / _LIST
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"window.siteVersions = {json.dumps(versions)};\n", encoding="utf-8")


if __name__ == "__main__":
    put_beside(*map(pathlib.Path, sys.argv[1:]))
