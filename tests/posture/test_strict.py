"""``strict=True`` opens where every layer is complete, and refuses where one would be weaker."""

from __future__ import annotations

import pytest
from tests.conftest import session_of

from union import sandbox as sb


@pytest.mark.threat(114)
@pytest.mark.spec("G1", "B9")
async def test_strict_refuses_a_masked_proc_and_nothing_else(jail: sb.Session) -> None:
    strict = session_of(jail.backend, strict=True)
    if jail.isolation.proc == "fresh":
        async with strict as session:
            assert session.isolation == jail.isolation
        return
    assert jail.isolation.proc == "inherited"
    with pytest.raises(sb.BackendUnavailableError, match="masks /proc") as caught:
        await strict.open()
    assert "procMount" in caught.value.hint
