"""Boot code of a template; this file is copied into the venv of constant files that it runs in.

The template goes through its own start until Python asks for the script. There it imports the
owner's modules and serves forks. A fork returns from ``serve`` inside its sandbox, looks at the
session venv, waits for its script (``_start_hook``) and goes on: from then on it is a Python like
any other. If the venv has files that take effect at the start of Python, it repeats that part.
"""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType
    from typing import Any

LAUNCHER_FD, HOST_FD, PROC_FD, OUTPUT_FD = 3, 4, 5, 6
READY = b"ready"
HOOK = "_union_sandbox"
DRIVER_FILE = "_union_sandbox_driver.py"
REHEARSED_SCRIPT = b"print(2+2)\n"
_MAX_REASON = 2000
_NEEDED_AT_EXIT = {"sys", "builtins", "__main__"}
_IMPORT_LISTS = ("path", "meta_path", "path_hooks")
_LINKER_OPTION = "LD_BIND_NOW"
_begun: list[bool] = []
_SIGKILL = 9
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT, _OF_FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56


def begin(
    library: str,
    venv: str,
    site_packages: str,
    site_dirs: list[str],
    preload: list[str],
) -> None:
    """Run from the template's .pth file; let Python go on until it asks for its script.

    Args:
        library: the path of the library with ``serve``.
        venv: the path of the venv, the same here and in the sandboxes.
        site_packages: the package directory of the venv.
        site_dirs: package directories of the owner.
        preload: modules to import.

    """
    if _begun:
        return
    _begun.append(True)
    os.environ.pop(_LINKER_OPTION, None)
    before = _import_lists()
    for site_dir in site_dirs:
        site.addsitedir(site_dir)
    with_owner = _import_lists()

    def stop(path: str) -> Any:
        """Serve forks where Python looks for an importer; raise ImportError if it has to look."""
        if path != sys.orig_argv[-1]:
            raise ImportError(path)
        sys.path_hooks = [hook for hook in sys.path_hooks if hook is not stop]
        fork = _serve(library, venv, site_packages, preload)
        # From here on this is the process of a command, inside its sandbox.
        is_archive = fork is not None and fork.go_on()
        try:
            if fork is None:
                _set_import_lists(before)
                site.addsitedir(site_packages)  # with a hook that waits for the script
                _complete_site()
            elif _has_start_files():
                _set_import_lists(with_owner)
                sys.path.insert(0, os.getcwd())
                _complete_site()
        except BaseException:  # noqa: BLE001 - Python does not start with such files, and says so
            _begin_afresh()
        if fork is None or is_archive:
            raise ImportError(path)
        return None

    sys.path_hooks.insert(0, stop)


def _serve(library: str, venv: str, site_packages: str, preload: list[str]) -> _Tools | None:
    """Import the modules and serve forks; return in the process of a command.

    Returns None if the session venv has files that take effect at the start of Python.
    """
    if "t" in sys.abiflags or hasattr(sys, "getobjects") or sys.implementation.name != "cpython":
        _refuse("this Python does not have the stable ABI of CPython")
    known = set(sys.modules) - {"__future__"}
    tools = _Tools(library)
    own = set(sys.modules) - known
    _refuse(_preload(preload, _open_files()))
    own = {name for name in own if not _is_used(name, known | own)}
    of_driver = tools.load_driver(f"{site_packages}/{DRIVER_FILE}") if preload else {}
    tools.keep(name for name in sys.modules if name not in own)
    packages = {name for name in tools.kept if "." not in name and _is_package(name, venv)}
    _warm_up(venv)
    for name in (*own, *of_driver, __name__):
        del sys.modules[name]
    is_rehearsal = tools.serve()
    tools.witness = []
    tools.sizes = _sizes()
    if tools.is_context():
        sys.modules.update(of_driver)
    names = [] if is_rehearsal else _names(site_packages)
    if packages.intersection(name.partition(".")[0] for name in names):
        # The session has its own version of a package that is loaded here: begin without it.
        tools.take_environment()
        _begin_afresh()
    _reseed()
    if any(_matters(name) for name in names):
        tools.take_environment()
        return None
    return tools


class _Tools:
    """Modules of the template's own, which a fork does not see as imported."""

    def __init__(self, library: str) -> None:
        import _weakref
        import atexit
        import gc
        import marshal

        self.hook: Any = __import__(HOOK)
        self.kept: dict[str, ModuleType] = {}
        self.witness: list[object] = []
        self.sizes = (0, 0)
        self._plain = plain_types()
        self._gc = gc
        self._marshal = marshal
        self._reference = _weakref.ref
        self._native = load(library)
        self._can_shorten = self._native.can_shorten()
        # The first function that is registered is called last.
        atexit.register(self._at_exit)

    def load_driver(self, path: str) -> dict[str, ModuleType]:
        """Execute the driver of contexts; return the modules that only the driver has imported."""
        known = set(sys.modules)
        with open(path, "rb") as file:
            self.hook.load_driver(file.read())
        return {name: module for name, module in sys.modules.items() if name not in known}

    def is_context(self) -> bool:
        """Return whether this fork will be the interpreter of a context."""
        hook = self.hook
        return bool(hook.stat.S_ISSOCK(os.fstat(hook.WAIT_FD).st_mode))

    def _hold_objects(self) -> None:
        """Hold all objects for ever: to free one, a fork copies the pages that it is in.

        Not the standard streams, which are flushed when they are freed.
        """
        streams = _ids_of_streams()
        held = [each for each in self._gc.get_objects() if id(each) not in streams]
        self._native.hold(held)

    def keep(self, names: Iterable[str]) -> None:
        """Know the modules that a fork sees as imported."""
        self.kept.update((name, sys.modules[name]) for name in list(names))
        if any(map(_is_native, self.kept.values())):
            self._can_shorten = False

    def _at_exit(self) -> None:
        """Leave out what a fork need not clean up."""
        try:
            self._shorten()
            _exempt_from_clean_up(self.kept)
        except Exception:  # noqa: BLE001, S110 - a script may have changed anything: end in full
            pass

    def _shorten(self) -> None:
        modules, native = self.kept, self._native
        added = [each for name, each in sys.modules.items() if each is not modules.get(name)]
        interpreters, threads = native.count()
        # Other interpreters end first, with the same events.
        if not self._can_shorten or interpreters > 1 or any(map(_is_native, added)):
            return
        functions = (sys.gettrace(), sys.getprofile(), *sys.get_asyncgen_hooks())
        has_hooks = functions != (None,) * len(functions)
        can_end = threads == 1 and not has_hooks and self._can_end()
        if can_end and _can_write(sys.stdout) and _can_write(sys.stderr):
            native.leave()
        if _can_write(sys.stderr):
            native.shorten(not has_hooks and native.has_no_context())

    def _can_end(self) -> bool:
        """Return whether nothing of the clean-up can be observed."""
        gc = self._gc
        is_observed = gc.callbacks or gc.garbage or gc.get_debug()
        has_streams = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        if is_observed or not has_streams or _sizes() != self.sizes:
            return False
        objects = gc.get_objects()
        types = (self._plain, self._reference, _Tools)
        return bool(self._native.can_end(objects, self.witness, *types))

    def go_on(self) -> bool:
        """Wait for the script, in a fork; return whether it can be an archive."""
        home = _home()
        is_archive = self.hook.go_on()
        # The import of sitecustomize, which is done, would have looked here as well.
        _find_importer(os.getcwd())
        if _home() != home:
            site.USER_BASE = site.USER_SITE = None
            site.getusersitepackages()
        return bool(is_archive)

    def serve(self) -> bool:
        """Serve forks; return in one of them, with whether it is a rehearsal."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._gc.collect()
        self._hold_objects()
        _copy_import_state()
        self._gc.freeze()
        if self._rehearse():
            return True
        self._gc.freeze()
        os.close(PROC_FD)
        os.close(OUTPUT_FD)
        os.write(HOST_FD, READY)
        self._native.serve(LAUNCHER_FD, HOST_FD)
        return False

    def _rehearse(self) -> bool:
        """Run a script in a fork, to learn which memory every run uses; return True in the fork.

        Without a result, pages are copied when a script uses them, which takes longer.
        """
        end, done = os.pipe()
        self._send_script()  # before the fork, which must use no more memory than a command does
        pid = os.fork()
        if pid == 0:
            self._native.rehearse(done)
            return True
        for fd in (done, self.hook.WAIT_FD, self.hook.SLOT_FD):
            os.close(fd)
        try:
            if os.read(end, 1):
                written, read = _used_memory(pid)
                numbers = (number for both in (*written, *read) for number in both)
                packed = b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)
                self._native.populate(packed, len(written))
        except OSError:
            pass  # this /proc does not show the fork, or not its memory
        os.kill(pid, _SIGKILL)
        os.waitpid(pid, 0)
        os.close(end)
        return False

    def _send_script(self) -> None:
        """Send the script of the rehearsal to a fork of this process, as the host sends one."""
        far, near = os.pipe()
        script = (REHEARSED_SCRIPT, dict(os.environ), os.getcwd())
        os.write(near, self._marshal.dumps(script))
        os.close(near)
        os.dup2(far, self.hook.WAIT_FD)
        os.close(far)
        slot = os.open(os.devnull, os.O_WRONLY)  # Python reads the same script of a constant file
        os.dup2(slot, self.hook.SLOT_FD)
        os.close(slot)

    def take_environment(self) -> None:
        """Set the environment that the command was sent with."""
        os.environ.clear()
        for item in self._native.environment():
            name, _, value = os.fsdecode(item).partition("=")
            os.environ[name] = value


# In the template.


def _import_lists() -> dict[str, list[Any]]:
    return {name: list(getattr(sys, name)) for name in _IMPORT_LISTS}


def _refuse(reason: str) -> None:
    """End this template, unless the reason is empty."""
    if reason:
        os.write(HOST_FD, reason.encode("utf-8", "replace")[:_MAX_REASON])
        os._exit(1)


def _preload(names: list[str], own_files: set[int]) -> str:
    """Import the modules; return why they cannot be shared by forks, or an empty string."""
    for name in names:
        try:
            __import__(name)
        except BaseException as exc:  # noqa: BLE001 - whatever a library raises is the reason
            return f"{name} cannot be imported: {type(exc).__name__}: {exc}"
        if refused := _unshareable(own_files):
            return f"{name} {refused}"
    return ""


def _unshareable(own_files: set[int]) -> str:
    """Return what forks would share, or lack, of what the last import did."""
    if _threads() > 1:
        # Libraries that expect forks end their threads before one, and start them again at need.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if _threads() > 1:
            return "starts threads, which a fork does not have"
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=PROC_FD), encoding="utf-8") as maps:
        for line in maps:
            if line.split(" ", 2)[1][1::2] == "ws":
                return "maps shared memory, which forks would share"
    if _open_files() - own_files:
        return "keeps a file open, which a fork does not have"
    return ""


def _threads() -> int:
    tasks = os.open("self/task", os.O_RDONLY, dir_fd=PROC_FD)
    count = len(os.listdir(tasks))
    os.close(tasks)
    return count


def _open_files() -> set[int]:
    """Return the descriptors that this process did not start with."""
    listed = os.open("self/fd", os.O_RDONLY, dir_fd=PROC_FD)
    found = {int(name) for name in os.listdir(listed)} - {listed}
    os.close(listed)
    return {fd for fd in found if fd > OUTPUT_FD and _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False  # of the listing itself
    return True


def _is_used(name: str, unused: set[str]) -> bool:
    """Return whether a module that the template itself needs was also imported by another."""
    module = sys.modules[name]
    return any(
        value is module
        for key, other in list(sys.modules.items())
        if key not in unused and hasattr(other, "__dict__")
        for value in list(vars(other).values())
    )


def _is_package(name: str, venv: str) -> bool:
    """Return whether a session could install its own version of a module, and would import that."""
    origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return origin.startswith("/") and not _is_standard(origin) and not origin.startswith(venv)


def _is_standard(origin: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return origin.startswith(os.path.dirname(os.__file__)) and "-packages/" not in origin


def load(library: str) -> Any:
    """Return the library with the launcher's code, as a module (native/template/module.c)."""
    import _imp

    namespace: Any = type(sys.implementation)
    module = _imp.create_dynamic(namespace(name="sandbox_template", origin=library))
    _imp.exec_dynamic(module)
    return module


def plain_types() -> tuple[type, ...]:
    """Return types whose objects end without a trace; dict and tuple first."""
    import types as t

    simple = (str, type(None), int, list, bytes, bool, float, object, set, frozenset, complex)
    code = (t.FunctionType, t.CodeType, t.CellType, t.ModuleType, t.BuiltinFunctionType, type)
    descriptors = (t.MethodDescriptorType, t.WrapperDescriptorType, t.GetSetDescriptorType)
    others = (t.MemberDescriptorType, t.MappingProxyType, property, classmethod, staticmethod)
    return (dict, tuple, *simple, *code, *descriptors, *others, range, slice, type(...))


def _ids_of_streams() -> set[int]:
    """Return the ids of the standard streams and their parts, and keep no reference to them."""
    found: set[int] = set()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        found |= {id(stream), id(stream.buffer), id(getattr(stream.buffer, "raw", None))}
    return found


def _warm_up(venv: str) -> None:
    """Read the directories of ``sys.path``; those that differ inside are read again there."""
    for finder in sys.meta_path:
        finder.find_spec("_union_sandbox_nothing", None)
    importers: dict[str, Any] = dict(sys.path_importer_cache)
    for path, importer in importers.items():
        if path.startswith(venv) and importer is not None:
            importer.invalidate_caches()


def _used_memory(pid: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (address, size) of what a fork has written, and of what it has read of files."""
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    with open(os.open(f"{pid}/maps", os.O_RDONLY, dir_fd=PROC_FD), encoding="utf-8") as maps:
        lines = maps.readlines()
    table = os.open(f"{pid}/pagemap", os.O_RDONLY, dir_fd=PROC_FD)
    for line in lines:
        span, mode, _, _, inode, *_ = line.split()
        begin, end = (int(text, 16) // _PAGE for text in span.split("-"))
        if end >= 1 << 51 or (inode == "0" and "w" not in mode):
            continue
        entries = memoryview(os.pread(table, (end - begin) * 8, begin * 8)).cast("Q")
        bit, found = (_EXCLUSIVE, written) if "w" in mode else (_OF_FILE, read)
        used = _PRESENT | bit
        _add_ranges(found, [begin + at for at, entry in enumerate(entries) if entry & used == used])
    os.close(table)
    return written, read


def _add_ranges(found: list[tuple[int, int]], pages: list[int]) -> None:
    begin = end = 0
    for page in pages:
        if page == end:
            end = page + 1
            continue
        if end:
            found.append((begin * _PAGE, (end - begin) * _PAGE))
        begin, end = page, page + 1
    if end:
        found.append((begin * _PAGE, (end - begin) * _PAGE))


def _copy_import_state() -> None:
    """Replace the containers of ``sys`` that are held: objects that a script adds are not."""
    sys.meta_path, sys.path_hooks = list(sys.meta_path), list(sys.path_hooks)
    sys.path_importer_cache = dict(sys.path_importer_cache)


# In a fork.


def _names(site_packages: str) -> list[str]:
    try:
        return os.listdir(site_packages)
    except OSError:
        return []


def _matters(name: str) -> bool:
    """Return whether a file of the session venv takes effect at the start of Python."""
    is_start_file = name.endswith((".pth", ".start")) and name != f"{HOOK}.pth"
    return is_start_file or name.startswith(("sitecustomize", "usercustomize"))


def _home() -> tuple[str | None, str | None]:
    """Return what ``site`` finds the packages of a user by."""
    return os.environ.get("HOME"), os.environ.get("PYTHONUSERBASE")


def _has_start_files() -> bool:
    """Return whether the home or the working directory has files that the start executes."""
    if site.ENABLE_USER_SITE and os.path.isdir(site.USER_SITE or ""):
        return True
    return os.access("sitecustomize.py", os.F_OK) or os.access("sitecustomize", os.F_OK)


def _begin_afresh() -> None:
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - the arguments that it started with


def _sizes() -> tuple[int, int]:
    """Return the sizes of what no object of a script refers to, but what keeps its objects."""
    return len(vars(sys)), len(vars(sys.modules["builtins"]))


def _set_import_lists(lists: dict[str, list[Any]]) -> None:
    for name, items in lists.items():
        getattr(sys, name)[:] = items


def _complete_site() -> None:
    """Do what ``site`` does after it has read the packages of a venv."""
    site.USER_BASE = site.USER_SITE = None  # as of the environment of the command
    known = set(sys.path)
    site.addusersitepackages(known)
    site.addsitepackages(known)
    site.execsitecustomize()
    if site.ENABLE_USER_SITE:
        site.execusercustomize()


def _find_importer(path: str) -> None:
    finder: Any = sys.modules["_frozen_importlib_external"]
    finder.PathFinder._path_importer_cache(path)  # noqa: SLF001 - what an import calls


def _reseed() -> None:
    """Give this fork random numbers of its own; ``random`` does that itself."""
    modules: dict[str, Any] = sys.modules
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _is_native(module: object) -> bool:
    """Return whether a module can have registered C functions for the end of Python."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
    return origin.endswith(".so") and (not _is_standard(origin) or "/_ctypes." in origin)


def _can_write(stream: Any) -> bool:
    """Return whether Python will not change the exit code because of this stream."""
    try:
        stream.flush()
    except Exception:  # noqa: BLE001 - whatever it is, Python finds it again
        return False
    return True


def _exempt_from_clean_up(kept: dict[str, ModuleType]) -> None:
    """Hide the template's modules from the clean-up at exit, which would copy all their pages."""
    for name in kept:
        if name in sys.modules and name not in _NEEDED_AT_EXIT:
            sys.modules[name] = None  # type: ignore[assignment] # as Python itself does at exit
