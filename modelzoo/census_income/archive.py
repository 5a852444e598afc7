"""Reads the Adult files that come along with the program, and makes their archive.

    python modelzoo/census_income/archive.py FOLDER

packs `adult.data` and `adult.test` of a folder, and data/NOTICE.md, into data/adult.zip. The same
files make the same archive: it holds no time, owner or mode of theirs.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
ARCHIVE, NOTICE = DATA / "adult.zip", DATA / "NOTICE.md"
FILES = ("adult.data", "adult.test")


def read(name: str) -> bytes:
    """Returns a file of the archive.

    Raises:
        OSError: there is no archive.
        zipfile.BadZipFile: it is damaged.
    """
    with zipfile.ZipFile(ARCHIVE) as archive:
        return archive.read(name)


def make(folder: Path, path: Path = ARCHIVE) -> None:
    """Makes the archive `path` of the files in `folder`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for source in (NOTICE, *(folder / name for name in FILES)):
            # The first moment that the format knows; readable by everyone.
            entry = zipfile.ZipInfo(source.name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, source.read_bytes(), compresslevel=9)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")
