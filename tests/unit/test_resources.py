from __future__ import annotations

import dataclasses
import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox import Resources, constants
from union.sandbox._core.resources import limits_from
from union.sandbox._core.spec import Limits
from union.sandbox.errors import SandboxUsageError

MIB = 2**20


def test_nothing_asked_is_the_safe_defaults():
    limits = limits_from(None)
    assert limits == limits_from(Resources()) == Limits()
    assert limits.processes == constants.DEFAULT_PROCESSES
    assert limits.open_files == constants.DEFAULT_OPEN_FILES
    assert limits.tmp_bytes == constants.DEFAULT_TMP_MIB * MIB
    assert limits.memory_bytes is None
    assert limits.cpus is None


@pytest.mark.parametrize(
    "text, number",
    [
        ("512Mi", 512 * MIB),
        ("1Gi", 2**30),
        ("1.5Gi", 3 * 2**29),
        ("2G", 2 * 10**9),
        ("65536Ki", 64 * MIB),
        ("1Ti", 2**40),
        ("134217728", 2**27),
        (2**27, 2**27),
        (" 1Gi ", 2**30),
    ],
)
def test_sizes(text, number):
    assert limits_from(Resources(memory=text)).memory_bytes == number


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "1 Gi",
        "-1Gi",
        "1Xi",
        "0",
        0,
        -5,
        math.nan,
        math.inf,
        True,
        [],
        "1e9",
        "Gi",
        b"1Gi",
        "9" * 400,
    ],
)
def test_wrong_sizes(value):
    with pytest.raises(SandboxUsageError, match="resources: memory must be") as caught:
        limits_from(Resources(memory=value))
    assert caught.value.argument == "resources"


@pytest.mark.parametrize("name", ["memory", "file_size", "tmp", "shm"])
@pytest.mark.parametrize("value", ["500m", 0.5, 10**400, 2**63, "9" * 400])
def test_a_size_fits_the_types_of_the_kernel(name, value):
    """Less than a byte would be written as 0, which to a tmpfs means no limit at all."""
    with pytest.raises(SandboxUsageError, match=name):
        limits_from(Resources(**{name: value}))


@pytest.mark.parametrize(
    "value, cpus", [(1, 1.0), (0.5, 0.5), ("500m", 0.5), ("2", 2.0), ((1, 4), 4.0)]
)
def test_processors(value, cpus):
    assert limits_from(Resources(cpu=value)).cpus == pytest.approx(cpus)


@pytest.mark.parametrize("name", ["processes", "session_processes", "open_files"])
def test_counts(name):
    assert getattr(limits_from(Resources(**{name: 7})), name) == 7
    for value in (0, -1, 1.5, "7", True, 2**63):
        with pytest.raises(SandboxUsageError, match=name):
            limits_from(Resources(**{name: value}))


def test_too_little_memory_is_an_error():
    with pytest.raises(SandboxUsageError, match="8Mi"):
        limits_from(Resources(memory="1Mi"))
    assert limits_from(Resources(memory="8Mi")).memory_bytes == 8 * MIB


@given(st.integers(8 * MIB, 2**40), st.integers(1, 2**40), st.integers(1, 2**40))
def test_scratch_never_exceeds_memory(memory, tmp, shm):
    limits = limits_from(Resources(memory=memory, tmp=tmp, shm=shm))
    assert limits.tmp_bytes == min(tmp, memory)
    assert limits.shm_bytes == min(shm, memory)


@pytest.mark.parametrize("value", [{"memory": "1Gi"}, "1Gi", 5, object(), Limits()])
def test_other_types_are_refused(value):
    with pytest.raises(SandboxUsageError, match=r"union\.sandbox\.Resources or a flyte\.Resources"):
        limits_from(value)


@pytest.fixture
def flyte_resources():
    """A type with the shape and the home of Flyte's own."""

    @dataclasses.dataclass
    class FlyteResources:
        cpu: object = None
        memory: object = None
        gpu: object = None
        disk: object = None
        shm: object = None

    FlyteResources.__module__ = "flyte._resources"
    sys.modules.setdefault("flyte._resources", types.ModuleType("flyte._resources"))
    yield FlyteResources
    sys.modules.pop("flyte._resources", None)


def test_flyte_resources_are_recognized_by_their_shape(flyte_resources):
    limits = limits_from(flyte_resources(cpu=("1", "2"), memory=("256Mi", "1Gi"), shm="auto"))
    assert (limits.cpus, limits.memory_bytes) == (2.0, 2**30)
    assert limits.shm_bytes == constants.DEFAULT_SHM_MIB * MIB
    assert limits_from(flyte_resources(shm="64Mi")).shm_bytes == 64 * MIB


@dataclasses.dataclass
class Device:
    """The shape of Flyte's own."""

    quantity: int
    device_class: str = "GPU"


@pytest.mark.parametrize(
    "gpu, count", [(None, 0), (0, 0), (2, 2), ("T4:1", 1), ("A100_80G:8", 8), (Device(3), 3)]
)
def test_a_number_of_gpus_is_understood(flyte_resources, gpu, count):
    assert limits_from(flyte_resources(gpu=gpu)).gpus == count


@pytest.mark.parametrize("gpu", ["AppleSilicon", "T4:", "T4:half", Device(1, "TPU"), -1, True])
def test_other_devices_are_refused(flyte_resources, gpu):
    with pytest.raises(SandboxUsageError, match="gpu must be"):
        limits_from(flyte_resources(gpu=gpu))


@pytest.mark.parametrize("gpu", ["1", 1.5, -1, False])
def test_our_own_gpu_is_a_number(gpu):
    with pytest.raises(SandboxUsageError, match="gpu must be a whole number"):
        limits_from(Resources(gpu=gpu))


def test_resources_are_values():
    assert Resources(cpu=1) == Resources(cpu=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Resources().cpu = 2


def test_a_run_has_no_more_processes_than_its_session() -> None:
    assert limits_from(Resources(processes=9000)).session_processes == 9000
    assert limits_from(Resources(session_processes=80)).processes == 80
    both = limits_from(Resources(processes=40, session_processes=80))
    assert (both.processes, both.session_processes) == (40, 80)
    with pytest.raises(SandboxUsageError, match=r"session_processes must be at least .*81.*not 80"):
        limits_from(Resources(processes=81, session_processes=80))
