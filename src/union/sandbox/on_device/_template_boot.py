"""Boot code of a template; this file is copied into the venv of constant files that it runs in.

The template stops in the middle of its own start, where a waiting Python reads the ``.pth`` files
of the session venv. It imports the owner's modules and serves forks. A fork returns from
``template_serve`` inside its sandbox, reads the session venv as untrusted, and continues its start
there: from then on it is a waiting Python like any other (``_start_hook``).
"""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

LAUNCHER_FD, HOST_FD, PROC_FD, OUTPUT_FD = 3, 4, 5, 6
READY = b"ready"
HOOK = "_union_sandbox"
DRIVER_FILE = "_union_sandbox_driver.py"
REHEARSED_SCRIPT = b"print(2+2)\n"
_MAX_REASON = 2000
_NEEDED_AT_EXIT = {"sys", "builtins", "__main__"}
_UNWINDER = (
    "_Unwind_Backtrace",
    "_Unwind_GetIP",
    "_Unwind_GetCFA",
    "_Unwind_GetGR",
    "_Unwind_FindEnclosingFunction",
)
_IMPORT_LISTS = ("path", "meta_path", "path_hooks")
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
    *,
    sees_system: bool,
) -> None:
    """Run from the template's .pth file; return in the process of a command.

    Args:
        library: the path of the library with ``template_serve``.
        venv: the path of the venv, the same here and in the sandboxes.
        site_packages: the package directory of the venv.
        site_dirs: package directories of the owner.
        preload: modules to import.
        sees_system: whether the packages of the base interpreter are visible.

    """
    if _begun:
        return
    _begun.append(True)
    own_files = _open_files()
    import_state = {name: list(getattr(sys, name)) for name in _IMPORT_LISTS}
    known = set(sys.modules) - {"__future__"}
    tools = _Tools(library)
    kept_open = {fd: os.pread(fd, os.fstat(fd).st_size, 0) for fd in _open_files() - own_files}
    own = set(sys.modules) - known
    for site_dir in site_dirs:
        site.addsitedir(site_dir)
    # What site.main() does after it has called this; a fork whose venv changes nothing skips it.
    if sees_system:
        site.addsitepackages(set(sys.path), [sys.base_prefix, sys.base_exec_prefix])
    site.execsitecustomize()
    refused = _preload(preload, own_files | set(kept_open))
    if refused:
        os.write(HOST_FD, refused.encode("utf-8", "replace")[:_MAX_REASON])
        os._exit(1)
    own = {name for name in own if not _is_used(name, known | own)}
    of_driver = tools.load_driver(f"{site_packages}/{DRIVER_FILE}") if preload else set()
    tools.keep(name for name in sys.modules if name not in own)
    packages = {name for name in tools.kept if "." not in name and _is_package(name, venv)}
    _warm_up(venv, tools.path if "ctypes" in own else "")
    is_rehearsal = tools.serve()
    # From here on this is the process of a command, inside its sandbox.
    unseen = own if tools.is_context() else own | of_driver
    for name in (*unseen, __name__):
        del sys.modules[name]
    _copy_import_state()
    for fd in own_files:
        _replace(fd)
    for fd, content in kept_open.items():
        _keep_open(fd, content)
    names = [] if is_rehearsal else _names(site_packages)
    if packages.intersection(name.partition(".")[0] for name in names):
        # The session has its own version of a package that is loaded here: begin without it.
        tools.take_environment()
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - the arguments that it started with
    _reseed()
    if any(_matters(name) for name in names):
        tools.take_environment()
        for name, before in import_state.items():
            getattr(sys, name)[:] = before
        site.addsitedir(site_packages)
        return
    _skip("addsitepackages")
    _skip("execsitecustomize")
    tools.hook.go_on()
    # The import of sitecustomize, which was omitted, would have looked here as well.
    _find_importer(os.getcwd())


class _Tools:
    """Modules of the template's own, which a fork does not see as imported."""

    def __init__(self, library: str) -> None:
        import _contextvars
        import atexit
        import ctypes
        import gc
        import importlib
        import marshal

        self.hook: Any = importlib.import_module(HOOK)
        self.path = os.path.dirname(ctypes.__file__)
        self.kept: dict[str, ModuleType] = {}
        self._copy_context = _contextvars.copy_context
        self._gc = gc
        self._marshal = marshal
        self._ctypes = ctypes
        self._native = ctypes.PyDLL(library)
        self._native.template_environment.restype = ctypes.POINTER(ctypes.c_char_p)
        self._finish = _quick_end(ctypes, self._native)
        # The first function that is registered is called last.
        atexit.register(self._at_exit)

    def load_driver(self, path: str) -> set[str]:
        """Execute the driver of contexts; return the modules that only the driver has imported."""
        known = set(sys.modules)
        with open(path, "rb") as file:
            self.hook.load_driver(file.read())
        return set(sys.modules) - known

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
        self._ctypes.pythonapi.Py_IncRef(self._ctypes.py_object(held))

    def keep(self, names: Iterable[str]) -> None:
        """Know the modules that a fork sees as imported."""
        self.kept.update((name, sys.modules[name]) for name in list(names))
        if any(map(_is_native, self.kept.values())):
            self._finish = None

    def _at_exit(self) -> None:
        """Leave out what a fork need not clean up."""
        kept, modules = self.kept, sys.modules
        added = [module for name, module in modules.items() if module is not kept.get(name)]
        if self._finish and _can_write(sys.stderr) and not any(map(_is_native, added)):
            self._finish(is_early=self._is_state_empty())
        _exempt_from_clean_up(kept)

    def _is_state_empty(self) -> bool:
        """Return whether the state of the interpreter refers to no object of the script."""
        functions = (sys.gettrace(), sys.getprofile(), *sys.get_asyncgen_hooks())
        return functions == (None,) * len(functions) and not len(self._copy_context())

    def serve(self) -> bool:
        """Serve forks; return in one of them, with whether it is a rehearsal."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._gc.collect()
        self._hold_objects()
        self._gc.freeze()
        if self._rehearse():
            return True
        self._gc.freeze()
        os.close(PROC_FD)
        os.close(OUTPUT_FD)
        self._ctypes.pythonapi.PyOS_BeforeFork()
        os.write(HOST_FD, READY)
        self._native.template_serve(LAUNCHER_FD, HOST_FD)
        self._ctypes.pythonapi.PyOS_AfterFork_Child()
        return False

    def _rehearse(self) -> bool:
        """Run a script in a fork, to learn which memory every run uses; return True in the fork.

        Without a result, pages are copied when a script uses them, which takes longer.
        """
        end, done = os.pipe()
        self._send_script()  # before the fork, which must use no more memory than a command does
        pid = os.fork()
        if pid == 0:
            self._native.template_rehearse(done)
            return True
        for fd in (done, self.hook.WAIT_FD, self.hook.SLOT_FD):
            os.close(fd)
        try:
            if os.read(end, 1):
                written, read = _used_memory(pid)
                flat = [number for both in (*written, *read) for number in both]
                ranges = (self._ctypes.c_uint64 * len(flat))(*flat)
                size = self._ctypes.c_size_t
                self._native.template_populate(
                    ranges, size(len(written)), size(len(written) + len(read))
                )
        except OSError:
            pass  # this /proc does not show the fork, or not its memory
        os.kill(pid, _SIGKILL)
        os.waitpid(pid, 0)
        os.close(end)
        return False

    def _send_script(self) -> None:
        """Send the script of the rehearsal to a fork of this process, as the host sends one."""
        far, near = os.pipe()
        # Python itself asks for a home, as it does with the environment of a script.
        script = (REHEARSED_SCRIPT, {**os.environ, "HOME": os.getcwd()}, os.getcwd())
        os.write(near, self._marshal.dumps(script))
        os.close(near)
        os.dup2(far, self.hook.WAIT_FD)
        os.close(far)
        slot = os.open(os.devnull, os.O_WRONLY)  # Python reads the same script of a constant file
        os.dup2(slot, self.hook.SLOT_FD)
        os.close(slot)

    def take_environment(self) -> None:
        """Set the environment that the command was sent with."""
        strings = self._native.template_environment()
        os.environ.clear()
        index = 0
        while (item := strings[index]) is not None:
            name, _, value = os.fsdecode(item).partition("=")
            os.environ[name] = value
            index += 1


# In the template.


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


def _quick_end(ctypes: Any, native: Any) -> Callable[..., object] | None:
    """Return what lets a fork omit the end of Python's clean-up, or None (template/finish.c)."""
    if sys.implementation.name != "cpython":
        return None
    try:
        unwinder = ctypes.CDLL("libgcc_s.so.1")
        functions = [ctypes.pythonapi.Py_FinalizeEx, *(unwinder[name] for name in _UNWINDER)]
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    if not native.template_finish_with((ctypes.c_uint64 * len(addresses))(*addresses)):
        return None
    add = ctypes.pythonapi.PySys_AddAuditHook
    add.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    hook = ctypes.cast(native.template_on_audit, ctypes.c_void_p)

    def finish(*, is_early: bool = False) -> object:
        return add(hook, hook if is_early else None)

    return finish


def _ids_of_streams() -> set[int]:
    """Return the ids of the standard streams and their parts, and keep no reference to them."""
    found: set[int] = set()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        found |= {id(stream), id(stream.buffer), id(getattr(stream.buffer, "raw", None))}
    return found


def _warm_up(venv: str, unused: str) -> None:
    """Read the directories of ``sys.path``; those that differ inside are read again there."""
    for finder in sys.meta_path:
        finder.find_spec("_union_sandbox_nothing", None)
    sys.path_importer_cache.pop(unused, None)
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


# In a fork.


def _copy_import_state() -> None:
    """Replace the containers of ``sys`` that are held: objects that a script adds are not."""
    sys.meta_path, sys.path_hooks = list(sys.meta_path), list(sys.path_hooks)
    sys.path_importer_cache = dict(sys.path_importer_cache)


def _replace(fd: int) -> None:
    """Replace the .pth file, which Python has open while it executes its lines: it ends here."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, fd, inheritable=False)
    if null != fd:
        os.close(null)


def _keep_open(fd: int, content: bytes) -> None:
    """Open a copy of a file that libffi, which has its number, maps for many callbacks.

    The template's own file is not for forks: a fork that wrote to it would change their code.
    """
    copy = os.memfd_create("libffi")
    os.write(copy, content)
    if copy != fd:
        os.dup2(copy, fd, inheritable=False)
        os.close(copy)


def _names(site_packages: str) -> list[str]:
    try:
        return os.listdir(site_packages)
    except OSError:
        return []


def _matters(name: str) -> bool:
    """Return whether a file of the session venv takes effect at the start of Python."""
    is_start_file = name.endswith((".pth", ".start")) and name != f"{HOOK}.pth"
    return is_start_file or name.startswith(("sitecustomize", "usercustomize"))


def _skip(step: str) -> None:
    """Omit the next call of a function of ``site``."""
    function = getattr(site, step)

    def omitted(known: object = None, *_: object) -> object:
        setattr(site, step, function)
        return known

    setattr(site, step, omitted)


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
