"""The driver of a Python context: runs inside the sandbox and keeps variables between cells.

The start hook executes this file before the packages of the venv are read. It imports the standard
library only. Output of a cell does not pass through here: it is written to descriptors 1 and 2, so
that C code and child processes are included. The messages are those of ``frames``.
"""

import _signal  # type: ignore[import-not-found]  # it has no stub
import ast
import builtins
import contextlib
import functools
import gc
import json
import linecache
import os
import resource
import socket
import struct
import sys
import time
import traceback
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

SOCKET_FD = 100
MAX_PACKET = 64 * 1024
MAX_DISPLAYS = 1000
MAX_RESULT_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 50
MAX_TRACEBACK = 48 * 1024
MAX_VALUE = 16 * 1024
MAX_LINE = 400
MAX_JSON_TEXT = 64 * 1024
MAX_SOURCES = 1000
SIGNAL_WAIT_S = 0.05
PACKET = struct.Struct("=BI")
DECODER = json.JSONDecoder()
ENCODER = json.JSONEncoder(separators=(",", ":"))
LENGTH = struct.Struct("=I")
FIRST = 1
CO_COROUTINE = 0x80
FIGURES = "_union_sandbox_figures"
FILE = "<_union_sandbox_driver>"
RICH = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
)
Head = dict[str, Any]


class Driver:
    """Receive cells from the host, execute them in ``__main__``, and report how they ended."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid = os.getpid()
        self.number = 0
        self.displays = 0
        self.result_bytes = 0
        self.dropped = 0
        self.is_running = False
        self.signals_running = 0
        # Only the signal handler changes the first, and only the main program the second.
        self.signals_idle = 0
        self.signals_used = 0
        self.on_interrupt = self._on_interrupt
        self.interrupt: KeyboardInterrupt | None = None
        """The exception that was raised in the present cell."""
        self.is_repeated = False
        sys.unraisablehook = self._on_unraisable
        self.loop: Any = None
        self.snapshots: dict[str, Any] | None = None
        self.successor: bytes | None = None
        """The address of the process that replaces this one."""
        self.sending = allocate_lock()
        self.sources: list[str] = []
        main = self.main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        sys.argv = [""]
        builtins.display = self.display  # type: ignore[attr-defined]
        os.environ.setdefault("MPLBACKEND", f"module://{FIGURES}")
        sys.meta_path.append(FigureBackend(self))
        # Output arrives as it is written, in order with that of child processes.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    # Messages.

    def send(self, head: Head, raw: bytes = b"") -> None:
        text = ENCODER.encode(head).encode("ascii")
        body = LENGTH.pack(len(text)) + text + raw
        room = MAX_PACKET - PACKET.size
        with self.sending:
            for start in range(0, len(body), room):
                part = body[start : start + room]
                left = len(body) - start - len(part)
                self.sock.send(PACKET.pack(FIRST if start == 0 else 0, left) + part)

    def receive(self) -> tuple[Head, bytes]:
        body = b""
        left = 1
        while left:
            if self.loop is not None:
                self._run_loop()
            packet = self.sock.recv(MAX_PACKET)
            if not packet:
                os._exit(0)  # the host has closed the context
            flags, left = PACKET.unpack_from(packet)
            body = (b"" if flags & FIRST else body) + packet[PACKET.size :]
        (size,) = LENGTH.unpack_from(body)
        end = LENGTH.size + size
        return DECODER.decode(body[LENGTH.size : end].decode("ascii")), body[end:]

    def _run_loop(self) -> None:
        """Run the tasks that cells left on the event loop until a message arrives."""
        loop = self.loop
        if loop.is_closed():
            self.loop = None
            return
        arrived = loop.create_future()
        loop.add_reader(self.sock, lambda: arrived.done() or arrived.set_result(None))
        try:
            loop.run_until_complete(arrived)
        finally:
            loop.remove_reader(self.sock)

    def serve(self) -> None:
        self._handle_signals()
        self.send({"t": "ready"})
        while True:
            head, raw = self.receive()
            try:
                self.cell(head, raw)
            except Resumed:  # this process is a saved interpreter that was restored
                self.pid = os.getpid()
                self.signals_running = self.signals_idle = self.signals_used = 0
                self._handle_signals()

    # Interrupts.

    def _handle_signals(self) -> None:
        # The functions of `signal` also convert to enumerations, for every cell.
        _signal.signal(_signal.SIGINT, self.on_interrupt)

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        # Once for each cell: its clean-up is not interrupted again.
        if self.is_running:
            self.signals_running += 1
            self.is_running = self.is_repeated = False
            self.interrupt = KeyboardInterrupt()
            raise self.interrupt
        if self.is_repeated:  # the cell has ended by itself
            self.is_repeated = False
        else:
            self.signals_idle += 1

    def _on_unraisable(self, unraisable: Any) -> None:
        """Interrupt the cell again if Python discarded the exception.

        It does so in weak reference callbacks, which every import calls, and in ``__del__``.
        """
        if self.interrupt is None or unraisable.exc_value is not self.interrupt:
            sys.__unraisablehook__(unraisable)
            return
        self.interrupt = None
        self.is_running = True
        start_new_thread(self._repeat_interrupt, (get_ident(),))

    def _repeat_interrupt(self, thread: int) -> None:
        time.sleep(0.001)  # the callback returns first
        self.is_repeated = True
        _signal.pthread_kill(thread, _signal.SIGINT)

    def _skip_late_signals(self, sent: int) -> None:
        """Discard signals that arrive after the end of the cell that they were sent to.

        Such a signal must not end the next cell, so wait for it briefly.

        Args:
            sent: the number of signals that the host has sent to the previous cell.

        """
        late = max(0, sent - self.signals_running)
        end = time.monotonic() + SIGNAL_WAIT_S
        while self.signals_idle - self.signals_used < late and time.monotonic() < end:
            time.sleep(0.001)
        self.signals_used += min(late, self.signals_idle - self.signals_used)
        self.signals_running = 0

    def _begin(self) -> None:
        """Let signals end the cell, and end it now if one arrived before."""
        self.is_running = True
        if self.signals_idle > self.signals_used:
            self.is_running = False
            self.signals_used = self.signals_idle
            self.signals_running = 1
            raise KeyboardInterrupt

    # Displays.

    def display(self, *values: object, **_: object) -> None:
        """Send each value to the caller of the cell in all MIME types that it supports."""
        for value in values:
            self.show(bundle_of(value), is_result=False)

    def show(self, bundle: Mapping[str, Any], *, is_result: bool) -> None:
        if os.getpid() != self.pid:
            return  # a forked child must not write into the messages of its parent
        parts = [(mime, *content_bytes(mime, value)) for mime, value in bundle.items()]
        size = sum(len(content) for _, content, _ in parts)
        room = MAX_RESULT_BYTES - self.result_bytes
        if size > room:
            parts = [
                (mime, content[:MAX_JSON_TEXT], is_raw)
                for mime, content, is_raw in parts
                if mime == "text/plain"
            ]
            size = sum(len(content) for _, content, _ in parts)
            self.dropped += 1
        if self.displays >= MAX_DISPLAYS or size > room:
            self.dropped += 1
            return
        self.displays += 1
        self.result_bytes += size
        head = {
            "t": "display",
            "n": self.number,
            "result": is_result,
            "parts": [
                {"mime": mime[:128], "size": len(content), "raw": is_raw}
                for mime, content, is_raw in parts[:32]
            ],
        }
        self.send(head, b"".join(content for _, content, _ in parts[:32]))

    def show_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            self.show({"image/png": png_of(figure), "text/plain": repr(figure)}, is_result=False)
            pyplot.close(figure)

    # Cells.

    def cell(self, head: Head, raw: bytes) -> None:
        number = self.number = head["n"]
        self._skip_late_signals(head.get("signals", 0))
        self.displays = self.result_bytes = self.dropped = 0
        self._handle_signals()
        before = usage()
        error: Head | None = None
        answer: bytes | None = None
        restored = replace_environment(head.get("env") or {})
        try:
            try:
                self._begin()
                answer = self._perform(head, raw)
            finally:
                self.is_running = False
                self.interrupt = None
        except Resumed:
            raise
        except BaseException as exc:  # noqa: BLE001 - every exception of a cell is data
            error = describe(exc)
        if os.getpid() != self.pid:
            os._exit(1 if error else 0)  # a forked child returned from the cell
        replace_environment(restored)
        flush()
        after = usage()
        self.send(
            {
                "t": "done",
                "n": number,
                "error": error,
                "dropped": self.dropped,
                "user_s": max(0.0, after[0] - before[0]),
                "system_s": max(0.0, after[1] - before[1]),
                "rss": after[2],
                "value": answer is not None,
            },
            answer or b"",
        )
        if self.successor is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
                sender.connect(self.successor)
                sender.send(b"go -")  # without an address: there is no answer
            os._exit(0)

    def _perform(self, head: Head, raw: bytes) -> bytes | None:
        operation = head["op"]
        if operation == "set":
            self.main.__dict__.update(json.loads(raw))
        elif operation == "get":
            return self._value(head["name"])
        elif operation in {"save", "restore", "discard"}:
            self.is_running = False  # not interrupted half-way
            if self.snapshots is None:  # most contexts are never saved: their host sends the code
                self.snapshots = {"Resumed": Resumed}
                exec(compile(raw, FILE, "exec"), self.snapshots)  # noqa: S102 - of the host
            found: bytes | None = self.snapshots["perform"](self, operation, head)
            return found
        else:
            self._execute(raw.decode("utf-8", "surrogateescape"), f"<cell {self.number}>")
            self.show_figures()
        return None

    def _value(self, name: str) -> bytes:
        try:
            value = self.main.__dict__[name]
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None
        found = json.dumps(value).encode("ascii")
        if len(found) > MAX_RESULT_BYTES:
            raise ValueError(f"{name} has {len(found)} bytes as JSON, at most {MAX_RESULT_BYTES}")
        return found

    def _execute(self, code: str, name: str) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        self.sources.append(name)
        if len(self.sources) > MAX_SOURCES:
            linecache.cache.pop(self.sources.pop(0), None)
        try:
            tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        except SyntaxError as exc:
            explain_magic(exc)
            raise
        last: ast.Expression | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            expression = tree.body.pop()
            if code.rstrip().endswith(";"):
                tree.body.append(expression)
            else:
                last = ast.Expression(expression.value)
        parts: list[CodeType] = []
        for node, mode in ((tree, "exec"), (last, "eval")):
            if isinstance(node, ast.Expression) or (node is not None and node.body):
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                parts.append(compile(node, name, mode, flags, dont_inherit=True))
        if any(part.co_flags & CO_COROUTINE for part in parts):
            value = self._await(parts)
        else:
            value = None
            for part in parts:
                value = eval(part, self.main.__dict__)  # noqa: S307 - executing cells is the purpose
        if last is not None and value is not None:
            self.main.__dict__["_"] = value
            self.show(bundle_of(value), is_result=True)

    def _await(self, parts: list[CodeType]) -> Any:
        """Run a cell with top-level ``await`` on the event loop of the context."""
        import asyncio

        async def run_parts() -> Any:
            value = None
            for part in parts:
                if part.co_flags & CO_COROUTINE:
                    value = await FunctionType(part, self.main.__dict__)()
                else:
                    value = eval(part, self.main.__dict__)  # noqa: S307 - as above
            return value

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task: Any = None
        try:
            task = self.loop.create_task(run_parts())
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self.loop.run_until_complete(task)
            raise


class Resumed(BaseException):
    """Ends the cell in which an interpreter was saved, in a process restored from it."""


class FigureBackend:
    """Finds the matplotlib backend named by MPLBACKEND and creates it at first use."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        if name != FIGURES:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, _spec: object) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        from importlib import import_module

        agg = import_module("matplotlib.backends.backend_agg")
        module.FigureCanvas = agg.FigureCanvasAgg
        module.show = lambda *_, **__: self.driver.show_figures()


def png_of(figure: Any) -> bytes:
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png", bbox_inches="tight")
    return out.getvalue()


def bundle_of(value: object) -> dict[str, Any]:
    """Return a value in every MIME type that it offers. Its own methods may fail; text remains."""
    found: dict[str, Any] = {}
    method = getattr(type(value), "_repr_mimebundle_", None)
    if method is not None:
        made = attempt(functools.partial(method, value, include=None, exclude=None))
        made = made[0] if isinstance(made, tuple) else made
        if isinstance(made, dict):
            found.update((str(mime), content) for mime, content in made.items())
    for name, mime in RICH:
        method = getattr(type(value), name, None)
        if mime not in found and method is not None:
            made = attempt(functools.partial(method, value))
            made = made[0] if isinstance(made, tuple) else made
            if made is not None:
                found[mime] = made
    if "text/plain" not in found:
        try:
            found["text/plain"] = repr(value)
        except Exception as exc:  # noqa: BLE001 - code of the cell
            name = type(value).__name__
            found["text/plain"] = f"<{name}: repr() raised {type(exc).__name__}>"
    text = found["text/plain"]
    is_small = isinstance(text, str) and len(text) < MAX_JSON_TEXT
    if type(value) in {dict, list} and "application/json" not in found and is_small:
        made = attempt(lambda: json.dumps(value, allow_nan=False))
        if made is not None:
            found["application/json"] = made
    return found


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a representation method; None if it fails."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - code of the cell
        return None


def content_bytes(mime: str, value: object) -> tuple[bytes, bool]:
    """Return a representation as bytes, and whether it is binary."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), True
    if not isinstance(value, str):
        value = attempt(lambda: json.dumps(value)) if "json" in mime else None
        value = str(value) if value is None else value
    if mime.startswith("image/") and mime != "image/svg+xml":
        import base64

        decoded = attempt(lambda: base64.b64decode(value, validate=False))
        if decoded is not None:
            return decoded, True
    return value.encode("utf-8", "replace"), False


def describe(exc: BaseException) -> Head:
    """Return an exception as data, without the frames of this file and of its event loop."""
    trace: TracebackType | None = exc.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        value = str(exc)
    except Exception as failed:  # noqa: BLE001 - code of the cell
        value = f"<str() raised {type(failed).__name__}>"
    try:
        made = traceback.TracebackException(type(exc), exc, trace, limit=-MAX_FRAMES, compact=True)
        made.stack[:] = [frame for frame in made.stack if frame.filename != FILE]
        text = "".join(made.format())
        frames = [
            {"file": f.filename, "line": f.lineno or 0, "function": f.name, "text": f.line or ""}
            for f in made.stack
        ]
    except Exception as failed:  # noqa: BLE001 - such as RecursionError, or code of the cell
        text, frames = f"<the traceback raised {type(failed).__name__}>", []
    if isinstance(exc, SyntaxError) and not frames:
        line = exc.lineno if isinstance(exc.lineno, int) else 0
        found = exc.text.strip() if isinstance(exc.text, str) else ""
        frames = [{"file": str(exc.filename), "line": line, "function": "<module>", "text": found}]
    for frame in frames:
        frame["file"] = str(frame["file"])[:MAX_LINE]
        frame["function"] = str(frame["function"])[:MAX_LINE]
        frame["text"] = str(frame["text"])[:MAX_LINE]
    return {
        "name": type(exc).__name__[:MAX_LINE],
        "value": value[:MAX_VALUE],
        "traceback": text[-MAX_TRACEBACK:],
        "frames": frames,
    }


def explain_magic(exc: SyntaxError) -> None:
    line = exc.text.lstrip() if isinstance(exc.text, str) else ""
    if line.startswith(("!", "%")):
        exc.add_note(
            "This is IPython syntax, and the context runs Python. Use subprocess.run([...]), or a "
            "bash context, for commands. matplotlib needs no %matplotlib."
        )


def usage() -> tuple[float, float, int]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        own.ru_utime + children.ru_utime,
        own.ru_stime + children.ru_stime,
        max(own.ru_maxrss, children.ru_maxrss) * 1024,
    )


def replace_environment(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables, or remove those with the value None; return the previous values."""
    previous = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return previous


def flush() -> None:
    streams: Iterable[Any] = (sys.stdout, sys.stderr)
    for stream in streams:
        attempt(stream.flush)  # the cell may have closed or replaced it


def main() -> None:
    """Serve the host until it closes the socket."""
    gc.unfreeze()
    sock = socket.socket(fileno=os.dup(SOCKET_FD))
    os.close(SOCKET_FD)
    os.set_inheritable(sock.fileno(), False)
    Driver(sock).serve()
