"""Start hook of the sandbox's Python; this file is copied into the session venv.

For a script of run() it puts the working directory on ``sys.path``. In a Python that was started
ahead of its script it waits for the script, the environment and the working directory. In the
Python of a context it waits for the driver first. Afterwards Python continues its normal start.
"""

import os
import site
import stat
import sys

_begun: list[bool] = []
_driver: list[bytes] = []
WAIT_FD, SLOT_FD = 100, 101
PRELOAD = "_UNION_SANDBOX_PRELOAD"
DRIVER = "_union_sandbox_driver"
_END_OF_ZIP = b"PK\5\6"


def begin(run_dir: str, site_dirs: list[str]) -> None:
    """Run from the venv's .pth file in every Python that starts there.

    Python reads the file twice; the second call does nothing.
    """
    if _begun:
        sys.modules.pop(__name__, None)
        return
    _begun.append(True)
    for site_dir in site_dirs:
        # As site directories, so that their own .pth files are read too.
        site.addsitedir(site_dir)
    if os.path.dirname([*sys.orig_argv, "", ""][1]) != run_dir:
        return
    try:
        os.fstat(WAIT_FD)
    except OSError:
        pass  # started with its script: nothing to wait for
    else:
        _wait()
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())


def go_on() -> bool:
    """Continue in a fork of a template, which has done ahead what ``begin`` does.

    Returns whether the script has what Python looks for at the end of a zip archive.
    """
    _begun.append(True)
    source = _wait(is_fork=True)
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    return _END_OF_ZIP in source


def _wait(*, is_fork: bool = False) -> bytes:
    import marshal

    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        try:
            __import__(name)
        except BaseException:  # noqa: BLE001, S112 - a script that imports it sees the error itself
            continue
    is_context = stat.S_ISSOCK(os.fstat(WAIT_FD).st_mode)
    if is_context:
        load_driver(os.read(WAIT_FD, 1 << 20))
    if not is_fork:
        _warm_up()
    if is_context:
        received = os.read(WAIT_FD, 1 << 20)  # one packet; the driver keeps the socket
    else:
        received = b""
        while chunk := os.read(WAIT_FD, 1 << 16):
            received += chunk
        os.close(WAIT_FD)
    if not received:
        os._exit(0)  # discarded without a script
    source, environment, cwd = marshal.loads(received)  # noqa: S302 - from the host, our owner
    left: bytes = source
    while left:
        left = left[os.write(SLOT_FD, left) :]
    os.close(SLOT_FD)
    # One by one: the methods for all at once use more of the memory that a fork shares.
    for name in [*os.environ]:
        if name not in environment:
            del os.environ[name]
    for name, value in environment.items():
        os.environ[name] = value
    os.chdir(cwd)
    _replace_main_module()
    return bytes(source)


def load_driver(source: bytes) -> None:
    """Execute the driver of a context ahead of its start, unless a template has done so."""
    if not source:
        os._exit(0)  # discarded
    if _driver == [source]:
        return
    _driver[:] = [source]
    module = sys.modules[DRIVER] = type(sys)(DRIVER)
    exec(compile(source, f"<{DRIVER}>", "exec"), module.__dict__)  # noqa: S102 - from the host


def _replace_main_module() -> None:
    """Create ``__main__`` again, so that the garbage collector tracks it.

    Objects that a script leaves there must be found at exit, or their ``__del__`` never runs.
    """
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    if "__annotations__" in main.__dict__:  # since Python 3.14 a module makes them on access
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main


def _warm_up() -> None:
    """Do ahead what every start does: read the directories of ``sys.path``.

    Existing objects are frozen, so that the garbage collector does not traverse them at exit.
    """
    known = "gc" in sys.modules
    import gc

    for finder in sys.meta_path:
        finder.find_spec("_union_sandbox_nothing", None)
    gc.collect()
    gc.freeze()
    if not known:
        del sys.modules["gc"]
