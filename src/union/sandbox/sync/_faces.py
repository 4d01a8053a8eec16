"""Faces: for each class of the asynchronous API, a class with the same members and no ``await``.

A face class is made from its asynchronous class when it is first needed: there is no list of
classes or methods. A class has a face if it is of this package and has coroutine methods,
asynchronous iteration or ``async with``.

- A method runs in the portal's loop. A coroutine that it returns is awaited there.
- Results that have a face are returned as faces; asynchronous iterators as iterators.
- ``async with`` becomes ``with``.
- Properties and attributes are read in the calling thread.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import copy
import functools
import inspect
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, cast

from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.sync import _portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import ModuleType, TracebackType

__all__ = ["BlockingIterator", "Face", "face_class", "has_face", "mirror", "public", "wrap"]

_T = TypeVar("_T")
_PACKAGE: Final = "union.sandbox"
_PUBLIC: Final = "union.sandbox.sync"
_ASYNC_PROTOCOLS: Final = frozenset({"__aenter__", "__aiter__", "__anext__"})
_KEEP_WORDS: Final = re.compile(r"\basync (with|for)\b|\bawait (?=[a-z(])")


def plain(text: str) -> str:
    """Return a text about the asynchronous API without ``async`` and ``await``."""
    return _KEEP_WORDS.sub(lambda found: found[1] or "", text)


def _is_ours(cls: type) -> bool:
    return cls.__module__ == _PACKAGE or cls.__module__.startswith(f"{_PACKAGE}.")


@functools.cache
def has_face(cls: type) -> bool:
    """Return whether values of a class are wrapped."""
    if issubclass(cls, collections.abc.Coroutine):
        return False  # it is awaited instead
    if not _is_ours(cls):
        made_by_a_decorator = cls.__module__ == contextlib.__name__
        return made_by_a_decorator and issubclass(cls, contextlib.AbstractAsyncContextManager)
    members = [
        (name, value)
        for base in cls.__mro__
        if _is_ours(base)
        for name, value in vars(base).items()
    ]
    return any(
        name in _ASYNC_PROTOCOLS
        or (
            not name.startswith("_")
            and (inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value))
        )
        for name, value in members
    )


class Face:
    """The synchronous face of one object."""

    __slots__ = ("__weakref__", "_generation", "_parent", "_target")
    _target: Any
    _parent: Face | None
    """The face that returned this one, which must live as long."""
    _generation: int | None

    def __init__(self) -> None:
        raise SandboxUsageError(
            f"sync.{type(self).__name__} cannot be created directly",
            hint="sync.on_device.session(), sync.remote.session() or sync.session(); "
            "sync.wrap(session) for a session of the asynchronous API",
        )

    def _perform(self, begin: Callable[[], Any]) -> Any:
        """Call ``begin`` in the portal and wrap its result."""
        now = _portal.generation()
        portal = _portal.Portal.current()
        if self._generation is not None and self._generation != now:
            raise SandboxUsageError(
                f"this {type(self).__name__} was used before fork() and belongs to the parent "
                "process",
                code="forked-session",
                hint="open a new session in the child process",
            )
        own = getattr(self._target, "_own_loop", None)
        if own is not None and own is not portal.loop:
            _refuse_in(own)
        try:
            value = portal.call(begin, on_interrupt=self._killer())
        except SandboxError as exc:
            _reword(exc)
            raise
        if self._generation is None:
            self._generation = now
            self._keep(portal)
        if type(value) in _SIMPLE:
            return value
        return self if value is self._target else wrap(value, self)

    def _keep(self, portal: _portal.Portal) -> None:
        """Have a session closed when its face is collected, and at interpreter exit."""
        if getattr(self._target, "_own_loop", None) not in {None, portal.loop}:
            return  # it was opened elsewhere, and is closed there
        if hasattr(type(self._target), "__aexit__") and hasattr(self._target, "close"):
            finalizer = weakref.finalize(self, _release, self._generation, self._target)
            finalizer.atexit = False  # the portal does it, in order
            portal.keep(self._target)

    def _closed(self) -> None:
        portal = _portal.running()
        if portal is not None:
            portal.forget(self._target)

    def _killer(self) -> Callable[[], None] | None:
        """Return the call that ends the command that this object belongs to, if it is one."""
        kill = getattr(self._target, "kill", None)
        if kill is None and self._parent is not None:
            kill = getattr(self._parent._target, "kill", None)  # noqa: SLF001 - of this class
        return cast("Callable[[], None] | None", kill)

    def __getattr__(self, name: str) -> Any:
        # Attributes of the instance; methods and properties are in the class.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return wrap(getattr(self._target, name), self)

    def __repr__(self) -> str:
        return f"<sync {repr(self._target).removeprefix('<')}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return wrap, (self._target,)

    def __copy__(self) -> Face:
        return cast("Face", wrap(copy.copy(self._target)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Face:
        return cast("Face", wrap(copy.deepcopy(self._target, memo)))


def _refuse_in(own: asyncio.AbstractEventLoop) -> None:
    """Raise if this thread runs the loop of the session, which a blocking call would stop."""
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        if asyncio.get_running_loop() is own:
            raise SandboxUsageError(
                "a synchronous call would block the event loop that the session belongs to",
                code="sync-in-callback",
                hint="use the asynchronous session in its own loop, or call from another thread",
            )


def _release(made: int | None, target: _portal.Closable) -> None:
    """Close an object whose face was collected."""
    if made == _portal.generation():
        portal = _portal.running()
        if portal is not None:
            portal.release(target)


def _reword(exc: SandboxError) -> None:
    exc.hint = plain(exc.hint)
    if exc.args and isinstance(exc.args[0], str):
        exc.args = (plain(exc.args[0]), *exc.args[1:])


class BlockingIterator(Generic[_T]):
    """Iterate over an asynchronous iterator. ``close()`` ends it early."""

    __slots__ = ("_owner", "_source")

    def __init__(self, source: AsyncIterator[_T], owner: Face) -> None:
        self._source = source
        self._owner = owner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        try:
            return cast("_T", self._owner._perform(self._source.__anext__))  # noqa: SLF001 - of this module
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the iteration and release what it holds."""
        aclose = getattr(self._source, "aclose", None)
        if aclose is not None:
            self._owner._perform(aclose)  # noqa: SLF001 - of this module


# Making the classes.


@functools.cache
def face_class(cls: type) -> type[Face]:
    """Return the face of an asynchronous class."""
    bases = tuple(face_class(base) for base in cls.__bases__ if has_face(base))
    covered = {base for parent in cls.__bases__ if has_face(parent) for base in parent.__mro__}
    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": _PUBLIC,
        "__doc__": plain(cls.__doc__ or ""),
    }
    for base in reversed(cls.__mro__):
        if base in covered or not (_is_ours(base) or base is cls):
            continue
        for name, value in vars(base).items():
            member = _member(name, value)
            if member is not None:
                members[name] = member
    if hasattr(cls, "__aenter__"):
        members |= {"__enter__": _enter, "__exit__": _exit}
    if hasattr(cls, "__aiter__"):
        members["__iter__"] = _iterate
    return type(cls.__name__, bases or (Face,), members)


def _member(name: str, value: Any) -> Any:
    if name.startswith("_"):
        return None
    if isinstance(value, property | functools.cached_property):
        return property(_reader(name), doc=plain(value.__doc__ or ""))
    if inspect.isfunction(value):
        return _method(value)
    return None  # class attributes are read by __getattr__


def _reader(name: str) -> Callable[[Face], Any]:
    def read(self: Face) -> Any:
        try:
            return wrap(getattr(self._target, name), self)
        except SandboxError as exc:
            _reword(exc)
            raise

    return read


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__

    def method(self: Face, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_unwrap, args))
        kwargs = {key: _unwrap(value) for key, value in kwargs.items()}
        return self._perform(lambda: getattr(self._target, name)(*args, **kwargs))

    def close(self: Face, /, *args: Any, **kwargs: Any) -> Any:
        method(self, *args, **kwargs)
        self._closed()

    return _described(close if name == "close" else method, function)


def _described(made: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(made, function)
    made.__module__ = _PUBLIC
    made.__doc__ = plain(function.__doc__ or "")
    return made


def _enter(self: Face) -> Any:
    return self._perform(self._target.__aenter__)


def _exit(
    self: Face,
    kind: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> Any:
    if self._generation is not None and self._generation != _portal.generation():
        return None  # in a forked child: the session is the parent's, and stays open
    done = self._perform(lambda: self._target.__aexit__(kind, exc, traceback))
    self._closed()
    return done


def _iterate(self: Face) -> BlockingIterator[Any]:
    return BlockingIterator(self._target.__aiter__(), self)


# Wrapping values.

_SIMPLE: Final = frozenset({type(None), bool, int, float, str, bytes})
_faces: Final[weakref.WeakValueDictionary[int, Face]] = weakref.WeakValueDictionary()
"""The live faces, by the id of their target, which they keep alive."""


def wrap(value: Any, parent: Face | None = None) -> Any:
    """Return the synchronous face of an object of the asynchronous API; others unchanged.

    Args:
        value: for example a ``Session`` that was received from asynchronous code.
        parent: the face that returned the value, which lives as long; None (default) for none.

    """
    kind: Any = type(value)
    if kind in _SIMPLE:
        return value
    if kind in {tuple, list}:
        # All elements of a sequence are of one kind, so the first decides.
        first: Any = type(value[0]) if value else str
        if first not in _SIMPLE and has_face(first):
            return kind(wrap(item, parent) for item in value)
        return value
    if has_face(kind):
        face = _faces.get(id(value))
        return _new_face(value, parent) if face is None else face
    if parent is not None and isinstance(value, collections.abc.AsyncIterator):
        return BlockingIterator(value, parent)
    return value


def _new_face(value: Any, parent: Face | None) -> Face:
    kind: Any = type(value)
    cls = face_class(kind)
    face = cls.__new__(cls)
    face._target = value  # noqa: SLF001 - of this module
    face._parent = parent  # noqa: SLF001 - of this module
    face._generation = None  # noqa: SLF001 - of this module
    return _faces.setdefault(id(value), face)


def _unwrap(value: Any) -> Any:
    return value._target if isinstance(value, Face) else value  # noqa: SLF001 - of this module


# Modules and functions.


def public(value: Any) -> Any:
    """Return the synchronous form of a public name of the package."""
    if inspect.isclass(value):
        cls: Any = value
        return face_class(cls) if has_face(cls) else value
    if inspect.isfunction(value) and _is_ours_function(value):
        return _function(value)
    return value


def _is_ours_function(function: Any) -> bool:
    return str(function.__module__).startswith(_PACKAGE)


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*map(_unwrap, args), **{k: _unwrap(v) for k, v in kwargs.items()})
        if isinstance(value, collections.abc.Coroutine):
            value = _await(value)
        return wrap(value)

    return _described(call, function)


def _await(awaitable: Any) -> Any:
    try:
        return _portal.Portal.current().call(lambda: awaitable, on_interrupt=None)
    except SandboxError as exc:
        _reword(exc)
        raise


def mirror(name: str, module: ModuleType) -> list[str]:
    """Define the public names of an asynchronous module in the module ``name``; return them."""
    own = vars(sys.modules[name])
    for public_name in module.__all__:
        own[public_name] = public(getattr(module, public_name))
    return list(module.__all__)
