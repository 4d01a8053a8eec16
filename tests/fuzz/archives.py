"""The corpus in the tree: one archive per target, because a thousand tiny files burden a checkout.

An archive is a ZIP file that holds each input under the SHA-1 of its bytes. Its own bytes depend on
the inputs alone, so an unchanged corpus is an unchanged file.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

CORPUS: Final = Path(__file__).parent / "corpus"
SUFFIX: Final = ".zip"
# The oldest date that the format can hold: the clock must not change the archive.
DATE: Final = (1980, 1, 1, 0, 0, 0)


def names(corpus: Path = CORPUS) -> list[str]:
    """Return the targets that have an archive."""
    return sorted(path.stem for path in corpus.glob(f"*{SUFFIX}"))


def load(name: str, corpus: Path = CORPUS) -> list[bytes]:
    """Return the inputs of one target, ordered by their digests; none without an archive."""
    path = corpus / f"{name}{SUFFIX}"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(entry) for entry in sorted(archive.namelist())]


def save(name: str, inputs: Iterable[bytes], corpus: Path = CORPUS) -> None:
    """Replace the inputs of one target."""
    corpus.mkdir(parents=True, exist_ok=True)
    kept = {digest(data): data for data in inputs}
    fresh = corpus / f".{name}{SUFFIX}"
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for key in sorted(kept):
            entry = zipfile.ZipInfo(key, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, kept[key], compresslevel=9)
    fresh.replace(corpus / f"{name}{SUFFIX}")


def unpack(inputs: Iterable[bytes], folder: Path) -> None:
    """Write inputs as files, as libFuzzer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / digest(data)).write_bytes(data)


def digest(data: bytes) -> str:
    """Return the name of an input."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
