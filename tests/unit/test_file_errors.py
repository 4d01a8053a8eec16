from __future__ import annotations

import copy
import errno
import pickle

import pytest

from union.sandbox._core import file_errors
from union.sandbox.errors import SandboxError, SandboxUsageError

FAMILY = {
    "SandboxFileAccessError": (PermissionError, errno.EACCES, "file-access"),
    "SandboxFileError": (OSError, errno.EIO, "file"),
    "SandboxFileExistsError": (FileExistsError, errno.EEXIST, "file-exists"),
    "SandboxFileNotFoundError": (FileNotFoundError, errno.ENOENT, "file-not-found"),
    "SandboxFileTooLargeError": (OSError, errno.EFBIG, "file-too-large"),
    "SandboxIsADirectoryError": (IsADirectoryError, errno.EISDIR, "is-a-directory"),
    "SandboxNotADirectoryError": (NotADirectoryError, errno.ENOTDIR, "not-a-directory"),
    "SandboxNotRegularError": (PermissionError, errno.EPERM, "not-regular"),
    "SandboxPathError": (PermissionError, errno.EPERM, "path-outside"),
}


def test_the_family_is_complete():
    assert sorted(FAMILY) == sorted(n for n in file_errors.__all__ if n.startswith("Sandbox"))


@pytest.mark.parametrize("name", FAMILY)
def test_each_is_ours_and_the_builtin_that_fits(name):
    builtin, number, code = FAMILY[name]
    exc = getattr(file_errors, name)("'a/b' is wrong", path="a/b", hint="do this")
    assert isinstance(exc, SandboxError)
    assert isinstance(exc, file_errors.SandboxFileError)
    assert isinstance(exc, builtin)
    assert (exc.errno, exc.filename, exc.code) == (number, "a/b", code)
    assert str(exc) == "'a/b' is wrong\nhint: do this"
    assert exc.args == ("'a/b' is wrong",)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_each_survives_pickling_and_copying(name, clone):
    exc = getattr(file_errors, name)("m", path="p", hint="h", code="special")
    again = clone(exc)
    assert type(again) is type(exc)
    assert str(again) == str(exc)
    assert (again.errno, again.filename, again.code) == (exc.errno, "p", "special")
    assert again.__dict__ == exc.__dict__


def test_a_path_error_is_a_usage_error_that_names_its_argument():
    exc = file_errors.SandboxPathError("m", path="p", argument="cwd")
    assert isinstance(exc, SandboxUsageError)
    assert isinstance(exc, ValueError)
    assert pickle.loads(pickle.dumps(exc)).argument == "cwd"


def test_the_number_can_be_the_kernels_own():
    assert file_errors.SandboxFileError("m", number=errno.ENOSPC).errno == errno.ENOSPC
