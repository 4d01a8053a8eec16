"""Records of cells for the console are bounded, whatever a cell displays."""

from __future__ import annotations

import struct

import pytest

from union.sandbox._contexts.specs import CellSpec
from union.sandbox._contexts.values import CellEnd, ErrorInfo, MimeBundle
from union.sandbox._core.spec import RunSpec
from union.sandbox.server import _cell_records as records
from union.sandbox.server._console_api import _decoder, _interleaved

SPEC = RunSpec(kind="python", text="x")


def record(cell: CellSpec | None = None) -> records.CellRecord:
    context = records.ContextRecord(SPEC, "python")
    return records.CellRecord(SPEC, context, 1, cell or CellSpec(code=b"x = 1"))


def bundle(**data: str | bytes) -> MimeBundle:
    return MimeBundle(
        kind="display", data={name.replace("_", "/"): value for name, value in data.items()}
    )


def png(width: int, height: int, size: int = 100) -> bytes:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR"
    return (head + struct.pack(">II", width, height)).ljust(size, b"\0")


def test_results_are_bounded_in_number_and_size():
    found = record(CellSpec(code=b"y" * 10**7))
    for _ in range(3000):
        found.display(bundle(text_plain="x" * 10**5))
    for _ in range(100):
        found.display(bundle(image_png=png(9, 9, 150_000)))
    found.cell_ended(CellEnd(error=ErrorInfo(name="E" * 10**6, value="", traceback="t" * 10**6)))
    assert found.held < records.MAX_SHOWN_BYTES + 64 * 1024
    assert len(found.shown) <= records.MAX_SHOWN + 3
    assert any("more results not shown" in item.get("text", "") for _, item in found.shown)
    assert len(found.described()["error"]) <= 101


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a",
        png(9, 9)[:20],
        png(0, 9),
        png(records.MAX_PIXELS + 1, 9),
        png(9, 2**32 - 1),
        png(9, 9, records.MAX_SHOWN_BYTES),
        png(9, 9).replace(b"IHDR", b"IDAT"),
    ],
)
def test_only_moderate_png_files_are_pictures(data: bytes):
    found = record()
    found.display(bundle(image_png=data, text_plain="as text"))
    assert found.shown[0][1] == {"display": "display", "mime": "text/plain", "text": "as text"}
    found.display(bundle(image_png=png(9, 8)))
    assert (found.shown[1][1]["display"], found.shown[1][1]["width"]) == ("picture", 9)


def test_values_of_variables_are_not_recorded():
    found = record(CellSpec(operation="set", code=b'{"key": "secret"}'))
    assert "secret" not in str(found.described()) + found.code


def test_results_follow_the_output_before_them():
    decoders = {1: _decoder(), 2: _decoder()}
    items = [(0, {"n": 1}), (3, {"n": 2}), (5, {"n": 3}), (5, {"n": 4})]
    lines = b"".join(_interleaved(0, [(1, b"abcd"), (2, b"e"), (1, b"fg")], items, decoders))
    assert lines.decode().splitlines() == [
        '{"n": 1}',
        '{"stream": "stdout", "text": "abc"}',
        '{"n": 2}',
        '{"stream": "stdout", "text": "d"}',
        '{"stream": "stderr", "text": "e"}',
        '{"n": 3}',
        '{"n": 4}',
        '{"stream": "stdout", "text": "fg"}',
    ]
