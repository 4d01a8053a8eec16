"""The timeline of checkpoints, and the differences, in the console."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.console.test_console import PAYLOADS, choose, page, signed_in  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.console.browser import Page
    from tests.console.conftest import Console


def call(console: Console, session: str, action: str, **fields: str) -> dict[str, Any]:
    payload = {"key": os.urandom(16).hex(), **fields}
    path = f"/v1/sessions/{session}/checkpoints/{action}"
    status, body = console.server.request("POST", path, json.dumps(payload).encode())
    assert status == 200, body
    return json.loads(body)


@pytest.mark.spec("L1")
def test_what_was_done_and_what_has_changed(console: Console) -> None:
    name = console.open()
    assert console.detail(name)["checkpoints"] == []
    console.run(name, "echo one > a; echo 1 > gone").join()
    kept = call(console, name, "take", name="before")["id"]
    console.run(name, "echo two >> a; rm gone; seq 200000 > many; printf x > $'b\\xff'").join()
    path = f"/v1/console/{name}/diff/{kept}"
    assert console.server.request("GET", path, Authorization="Bearer wrong")[0] == 401
    found = console.server.get_json(path)
    assert found["total"] == 4
    by_path = {change["path"]: change for change in found["changes"]}
    assert by_path["a"]["action"] == "changed"
    assert "+two" in by_path["a"]["text"]
    assert by_path["many"]["text"] is None  # too large for a page
    assert by_path["gone"]["action"] == "deleted"
    assert "b\ufffd" in by_path
    call(console, name, "rollback", checkpoint=kept)
    call(console, name, "drop", checkpoint=kept)
    events = console.detail(name)["checkpoints"]
    assert [event["action"] for event in events] == ["checkpoint", "rollback", "drop"]
    assert {event["id"] for event in events} == {kept}
    assert console.server.request("GET", f"/v1/console/{name}/diff/{kept}")[0] == 404


@pytest.mark.spec("L1")
def test_the_page_shows_them_as_text(console: Console, signed_in: Page) -> None:  # noqa: F811
    name = console.open()
    console.run(name, "echo old > page.html").join()
    call(console, name, "take", name=PAYLOADS[0])
    text = "\n".join(PAYLOADS).replace("'", '"')
    console.run(name, f"cat > page.html <<'EOT'\n{text}\nEOT\ntouch '<b>bold'").join()
    console.run(name, "sleep 60")  # its request keeps the session open
    choose(signed_in, name)
    signed_in.until("document.querySelectorAll('#checkpoints tbody tr').length === 1")
    signed_in.click("#checkpoints button")
    signed_in.until("document.querySelectorAll('#changes .added').length === 4")
    shown = "document.querySelector('#changes').textContent"
    signed_in.until(f"{shown}.includes('<script>') && {shown}.includes('<b>bold')")
    assert signed_in.do("window.pwned === undefined") is True
    assert signed_in.do("document.querySelector('#changes b, #changes script')") is None
