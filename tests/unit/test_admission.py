"""The admission queue: in order, and no slot is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import SOON_S

from union.sandbox.remote._admission import MAX_STARTING, Admission, Slot

LONG_S = 30.0


async def entered(admission: Admission) -> Slot:
    slot = await admission.enter(LONG_S)
    assert slot is not None
    return slot


@pytest.mark.threat(159)
async def test_the_number_of_unanswered_starts_is_limited():
    admission = Admission()
    slots = [await entered(admission) for _ in range(MAX_STARTING)]
    waiting = asyncio.ensure_future(admission.enter(LONG_S))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    slots[0].started()
    assert await asyncio.wait_for(waiting, SOON_S) is not None


async def test_started_runs_are_not_limited_until_the_server_is_busy():
    admission = Admission()
    for _ in range(500):
        (await entered(admission)).started()


async def test_a_refused_run_is_sent_again_before_those_behind_it():
    admission = Admission()
    running = await entered(admission)
    running.started()
    refused = await entered(admission)
    refused.release()
    order: list[str] = []

    async def again(name: str, *, first: bool) -> None:
        slot = await (admission.enter_again if first else admission.enter)(LONG_S)
        assert slot is not None
        order.append(name)

    front = asyncio.ensure_future(again("front", first=True))
    behind = asyncio.ensure_future(again("behind", first=False))
    await asyncio.sleep(0)
    running.release()
    await asyncio.wait_for(asyncio.gather(front, behind), 40)
    assert order == ["front", "behind"]


async def test_waiting_ends_when_the_server_makes_no_progress():
    admission = Admission()
    (await entered(admission)).started()
    (await entered(admission)).release()
    assert await admission.enter_again(0.0) is None


async def test_a_slot_is_released_once():
    admission = Admission()
    slot = await entered(admission)
    slot.started()
    for _ in range(3):
        slot.release()
        slot.started()
    assert (admission._active, admission._starting) == (0, 0)


@given(st.lists(st.sampled_from(["enter", "start", "release", "refuse", "cancel"]), max_size=60))
@settings(max_examples=60)
def test_no_slot_is_lost_or_created(steps):
    async def play() -> None:
        admission = Admission()
        waiting: list[asyncio.Future[Slot | None]] = []
        held: list[Slot] = []
        for step in steps:
            await asyncio.sleep(0)
            held += [w.result() for w in waiting if w.done() and not w.cancelled()]
            waiting = [w for w in waiting if not w.done()]
            if step == "enter":
                waiting.append(asyncio.ensure_future(admission.enter(LONG_S)))
            elif step == "start" and held:
                held[0].started()
            elif step == "release" and held:
                held.pop(0).release()
            elif step == "refuse" and held:
                held.pop().release()
                waiting.append(asyncio.ensure_future(admission.enter_again(LONG_S)))
            elif step == "cancel" and waiting:
                waiting.pop().cancel()
        admission.close()
        for slot in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(slot, Slot):
                slot.release()
        await asyncio.sleep(0)
        for slot in held:
            slot.release()
        assert not admission._queue
        assert admission._active == admission._starting == 0

    asyncio.run(play())
