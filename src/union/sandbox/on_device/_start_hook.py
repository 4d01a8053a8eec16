"""Runs inside the sandbox, while Python starts there; this file is copied into the session venv.

It does two things for a script of run(): what lies in the working directory can be imported, and a
Python that was started ahead of its script waits here for the script, the environment and the
working directory. Everything after that is Python's own start, as if nothing had happened.
"""

import os
import site
import sys

_begun: list[bool] = []
WAIT_FD, SLOT_FD = 100, 101
PRELOAD = "_UNION_SANDBOX_PRELOAD"


def begin(run_dir: str, site_dirs: list[str]) -> None:
    """Called from the venv's .pth file, by every Python that starts there.

    Twice, in fact, since Python reads the file twice; once is enough.
    """
    if _begun:
        sys.modules.pop(__name__, None)
        return
    _begun.append(True)
    for site_dir in site_dirs:
        # As site directories, not just paths, so that their own .pth files count too.
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
    _settle_down()
    received = b""
    while chunk := os.read(WAIT_FD, 1 << 20):
        received += chunk
    os.close(WAIT_FD)
    if not received:
        os._exit(0)  # let go unused
    source, environment, cwd = marshal.loads(received)  # noqa: S302 - from the host, our owner
    while source:
        source = source[os.write(SLOT_FD, source) :]
    os.close(SLOT_FD)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _renew_main()


def _renew_main() -> None:
    """Makes the script's own module anew, in the collector's sight.

    What a script leaves there must be found when the program ends, or its ``__del__`` never runs.
    """
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__, __annotations__={})
    sys.modules["__main__"] = main


def _settle_down() -> None:
    """Does ahead what every start does anyway: looks into the directories of sys.path.

    And takes what is there by now out of the collector's sight, so that the end of the program does
    not go through all of it again.
    """
    known = "gc" in sys.modules
    import gc

    for finder in sys.meta_path:
        finder.find_spec("_union_sandbox_nothing", None)
    gc.collect()
    gc.freeze()
    if not known:
        del sys.modules["gc"]
