"""The object store: as much of the S3 protocol as the SDK's client uses, kept in memory.

A plain directory does not do (the SDK makes no parent directories in an object store), and a
full emulator is a large dependency. No signature is checked: the store listens on loopback and
ends with the test.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Scope = dict[str, Any]
    Receive = Callable[[], Awaitable[dict[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

BUCKET = "plane"
MOUNT = "/s3"
"""The path of the store on the plane's port."""
_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"
_MODIFIED_ISO = "2026-01-01T00:00:00.000Z"


class Store:
    """Objects by key, and an ASGI application that serves them as one bucket."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refused: str | None = None
        """No object with this in its key can be read or written."""
        self._parts: dict[str, dict[int, bytes]] = {}

    @staticmethod
    def uri(key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def read(self, uri: str) -> bytes | None:
        """The object at a URI of this store, if there is one."""
        return self.objects.get(uri.removeprefix(f"s3://{BUCKET}/"))

    def write(self, uri: str, content: bytes) -> None:
        self.objects[uri.removeprefix(f"s3://{BUCKET}/")] = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = unquote(scope["raw_path"].decode().partition("?")[0])
        bucket, _, key = path.removeprefix(MOUNT).lstrip("/").partition("/")
        query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode(), True).items()}
        headers = {k.decode().lower(): v.decode() for k, v in scope["headers"]}
        body = await _body(receive)
        if bucket != BUCKET:
            await _answer(send, 404, _error("NoSuchBucket"))
        elif self.refused is not None and self.refused in key:
            await _answer(send, 403, _error("AccessDenied"))
        elif not key and scope["method"] == "GET":
            await _answer(send, 200, self._listing(query))
        elif scope["method"] in {"GET", "HEAD"}:
            await self._get(send, key, headers.get("range"), head=scope["method"] == "HEAD")
        elif scope["method"] == "PUT":
            await self._put(send, key, query, body)
        elif scope["method"] == "POST":
            await self._post(send, key, query)
        elif scope["method"] == "DELETE":
            self.objects.pop(key, None)
            await _answer(send, 204)
        else:
            await _answer(send, 405, _error("MethodNotAllowed"))

    async def _get(self, send: Send, key: str, asked: str | None, *, head: bool) -> None:
        content = self.objects.get(key)
        if content is None:
            await _answer(send, 404, b"" if head else _error("NoSuchKey"))
            return
        more = {"etag": _etag(content), "last-modified": _MODIFIED, "accept-ranges": "bytes"}
        if head:
            await _answer(send, 200, b"", more, length=len(content))
            return
        if asked is None:
            await _answer(send, 200, content, more)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last), len(content) - 1) if first and last else len(content) - 1
        if begin >= len(content):
            await _answer(send, 416, _error("InvalidRange"))
            return
        more["content-range"] = f"bytes {begin}-{end}/{len(content)}"
        await _answer(send, 206, content[begin : end + 1], more)

    async def _put(self, send: Send, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.objects[key] = body
        await _answer(send, 200, b"", {"etag": _etag(body)})

    async def _post(self, send: Send, key: str, query: dict[str, str]) -> None:
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self._parts[upload] = {}
            body = f"<UploadId>{upload}</UploadId><Key>{escape(key)}</Key>"
            await _answer(send, 200, _document("InitiateMultipartUploadResult", body))
            return
        parts = self._parts.pop(query["uploadId"])
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        body = f"<Key>{escape(key)}</Key><ETag>{_etag(self.objects[key])}</ETag>"
        await _answer(send, 200, _document("CompleteMultipartUploadResult", body))

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        rows, folders = [], set()
        for key in sorted(k for k in self.objects if k.startswith(prefix)):
            folder = key[len(prefix) :].find(cut) if cut else -1
            if folder >= 0:
                folders.add(key[: len(prefix) + folder + 1])
                continue
            content = self.objects[key]
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size>"
                f"<ETag>{_etag(content)}</ETag><LastModified>{_MODIFIED_ISO}</LastModified></Contents>"
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>"
            for f in sorted(folders)
        ]
        return _document("ListBucketResult", "<IsTruncated>false</IsTruncated>" + "".join(rows))


async def _body(receive: Receive) -> bytes:
    found = b""
    while True:
        message = await receive()
        found += message.get("body", b"")
        if not message.get("more_body"):
            return found


async def _answer(
    send: Send,
    status: int,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    *,
    length: int | None = None,
) -> None:
    payload = {"content-length": str(len(body) if length is None else length), **(headers or {})}
    pairs = [(k.encode(), v.encode()) for k, v in payload.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _document(name: str, body: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{body}</{name}>'.encode()


def _error(code: str) -> bytes:
    return _document("Error", f"<Code>{code}</Code><Message>{code}</Message>")
