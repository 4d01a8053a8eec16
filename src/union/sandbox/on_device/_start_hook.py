"""Start hook of the sandbox's Python; this file is copied into the session venv.

For a script of run() it puts the working directory on ``sys.path``. In a Python that was started
ahead of its script it waits for the script, the environment and the working directory. Afterwards
Python continues its normal start.
"""

import os
import site
import sys

_begun: list[bool] = []
WAIT_FD, SLOT_FD = 100, 101
PRELOAD = "_UNION_SANDBOX_PRELOAD"


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


def _wait() -> None:
    import marshal

    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        __import__(name)
    _warm_up()
    received = b""
    while chunk := os.read(WAIT_FD, 1 << 20):
        received += chunk
    os.close(WAIT_FD)
    if not received:
        os._exit(0)  # discarded without a script
    source, environment, cwd = marshal.loads(received)  # noqa: S302 - from the host, our owner
    while source:
        source = source[os.write(SLOT_FD, source) :]
    os.close(SLOT_FD)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _replace_main_module()


def _replace_main_module() -> None:
    """Create ``__main__`` again, so that the garbage collector tracks it.

    Objects that a script leaves there must be found at exit, or their ``__del__`` never runs.
    """
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__, __annotations__={})
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
