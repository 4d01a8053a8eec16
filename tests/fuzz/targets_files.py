"""Fuzz target: the replies of the helper that performs file calls inside a sandbox."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from union.sandbox._files.inside_frames import PIECE_BYTES, Decoder, FrameError

if TYPE_CHECKING:
    from union.sandbox._files.inside_frames import Reply


def replies(data: bytes) -> None:
    """Any bytes are replies that keep the promises, or a violation; memory stays bounded."""
    decoder = Decoder()
    step = 1 + (data[0] if data else 0)
    with suppress(FrameError):
        for at in range(1, len(data), step):
            for reply in decoder.feed(data[at : at + step]):
                _look_at(reply)
    assert len(decoder._held) <= 2 * PIECE_BYTES


def _look_at(reply: Reply) -> None:
    assert reply.number >= 0
    assert len(reply.body) <= PIECE_BYTES
    with suppress(FrameError):
        error = reply.error
        assert error is None or (0 < error[0] <= 4095 and len(error[1]) <= 200)
    with suppress(FrameError):
        assert reply.size >= 0
    with suppress(FrameError):
        assert reply.info("p").path == "p"
    with suppress(FrameError):
        for info in reply.entries("top/"):
            name = info.path.removeprefix("top/")
            assert name == info.name
            assert name not in {"", ".", ".."}
            assert "\0" not in name
    with suppress(FrameError):
        for path in reply.paths():
            assert path
            assert "\0" not in path
            path.encode("utf-8", "surrogateescape")
    with suppress(FrameError):
        for change in reply.changes("top/"):
            assert change.path.startswith("top")
