"""The console in a real browser."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.servers import ServerProcess

from union.sandbox import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.console.browser import Page
    from tests.console.conftest import Console

LINES = "document.querySelectorAll('#screen > div').length"
SCREEN = "(document.querySelector('#screen')?.textContent ?? '')"
# These run in a page that interprets text as markup. Each sets `pwned`.
PAYLOADS = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload='window.pwned = 1'></svg>",
    "</div></code><iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
)


@pytest.fixture
def page(console: Console, tab: Page) -> Iterator[Page]:
    """Load the console, signed out."""
    tab.go(f"{console.url}icon.svg")  # the same origin, and no script that would sign in
    tab.do("sessionStorage.clear()")
    tab.events.clear()
    tab.go(console.url)
    tab.until("!document.getElementById('login').hidden")
    yield tab
    here = (console.server.endpoint + "/", "about:blank")
    foreign = [url for url in tab.requests() if not url.startswith(here)]
    faults = [text for text in tab.complaints() if "401" not in text and "[DOM]" not in text]
    tab.go("about:blank")
    assert foreign == []
    assert faults == []


def sign_in(page: Page, token: str | None) -> None:
    page.click("#token")
    page.type(token or "")
    page.click("#login-form button")


@pytest.fixture
def signed_in(console: Console, page: Page) -> Page:
    sign_in(page, console.server.token)
    page.until("!document.getElementById('console').hidden")
    return page


def choose(page: Page, session: str) -> None:
    item = f"#session-list li[data-key='{session}'] button"
    page.until(f"document.querySelector({json.dumps(item)}) !== null")
    page.click(item)
    page.until(f"document.querySelector('article')?.ariaLabel === 'Session {session[:8]}'")


@pytest.mark.spec("I1")
def test_an_invalid_token_shows_an_error_only(console: Console, page: Page):
    name = console.open()
    console.run(name, "echo secret-output").join()
    sign_in(page, "not the token of this server")
    page.until("document.getElementById('login-error').textContent !== ''")
    assert "Invalid token." in page.text()
    assert page.do("document.getElementById('console').hidden")
    everything = page.do("document.documentElement.outerHTML")
    for shown in (name[:8], "secret-output", "userns", str(console.server.work_dir)):
        assert shown not in everything
    assert page.do("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
    # Positive control: the valid token, in the same page.
    sign_in(page, console.server.token)
    page.until("document.querySelectorAll('#session-list li').length === 1")
    assert name[:8] in page.text()


@pytest.mark.spec("I1")
def test_sessions_and_live_output_appear(console: Console, signed_in: Page):
    page = signed_in
    page.until("document.body.innerText.includes('No open sessions')")
    name = console.open(network_mode="allowlist", network_allowlist=["allowed.example"])
    run = console.run(
        name,
        "getent hosts refused.example; echo out-1; echo err-1 >&2;"
        "while [ ! -e go ]; do sleep 0.02; done; echo out-2; exit 3",
    )
    page.until(f"{SCREEN}.includes('out-1') && {SCREEN}.includes('err-1')")
    text = page.text()
    assert "out-2\n" not in text
    for word in (name[:8], "userns", "network allowlist", "1 running", "in use by a request"):
        assert word in text, word
    assert str(console.server.work_dir) in text
    assert page.do("document.querySelector('#runs tbody .badge').textContent") == "running"
    assert console.server.request("PUT", f"/v1/sessions/{name}/file?path=go", b"")[0] == 200
    page.until(f"{SCREEN}.includes('out-2') && {SCREEN}.includes('ended with exit code 3')")
    page.until("document.querySelector('#runs tbody .badge').textContent === 'exit 3'")
    assert run.end["exited"]["returncode"] == 3
    classes = page.do("[...document.querySelectorAll('#screen div')].map(d => d.className)")
    assert {"stdout", "stderr", "note"} == set(classes)
    # Refused connections, and the isolation.
    decision = page.until("document.querySelector('#decisions tbody tr')?.innerText")
    assert "refused.example" in decision
    assert "refused" in decision
    isolation = page.do("document.getElementById('isolation').innerText")
    for word in ("Namespaces", "Root", "Capabilities", "kernel"):
        assert word in isolation, isolation
    assert page.do("document.querySelectorAll('.tile strong').length") == 8


@pytest.mark.spec("M4")
def test_requests_to_bound_hosts_appear(console: Console, signed_in: Page):
    page = signed_in
    entry = {"id": "a" * 32, "host": "api.test", "allow": ["GET /x"]}
    name = console.open(network_mode="allowlist", network_allowlist=[entry])
    console.run(name, "curl -s 'http://api.test/refused?key=value'")
    row = page.until("document.querySelector('#requests tbody tr')?.innerText")
    for word in ("GET api.test/refused", "refused", "no rule of"):
        assert word in row, row
    assert "key=value" not in page.do("document.getElementById('requests').innerText")


def test_the_token_stays_in_the_tab_and_out_of_addresses(console: Console, signed_in: Page):
    page, token = signed_in, str(console.server.token)
    page.until("document.querySelector('.tile') !== null")
    page.go(console.url)
    page.until("!document.getElementById('console').hidden")  # a reload keeps it
    assert page.do("[localStorage.length, document.cookie]") == [0, ""]
    assert not [url for url in page.requests() if token in url]
    page.click("#logout")
    page.until("!document.getElementById('login').hidden")
    assert page.do("sessionStorage.length") == 0
    assert page.do("document.getElementById('detail').textContent") == ""
    # In a link, it is in the fragment, which is removed from the address at once.
    page.go("about:blank")
    page.go(f"{console.url}#token={token}")
    page.until("!document.getElementById('console').hidden")
    assert page.do("location.href") == console.url
    assert not [url for url in page.requests() if token in url]
    assert token not in console.server.log.read_text()


def test_hostile_output_is_text(console: Console, signed_in: Page):
    page = signed_in
    name = console.open(env={"P": "".join(PAYLOADS)})
    command = f'printf "%s\\n" "$P"; printf "%s\\n" "$P" >&2; : {"".join(PAYLOADS)!r}'
    console.run(name, command).join()
    console.run(name, "".join(PAYLOADS)).join()  # as a command, too
    choose(page, name)
    page.until("document.querySelectorAll('#runs tbody tr').length === 2")
    page.click("#runs tbody tr:last-child button.command")
    page.until(f"{SCREEN}.includes({json.dumps(PAYLOADS[0])})")
    shown = page.text()
    for payload in PAYLOADS:
        assert shown.count(payload) >= 2
    assert page.do("document.querySelectorAll('#detail :is(script, img, iframe)').length") == 0
    assert page.do("window.pwned") is None
    # Second layer: the policy keeps the browser from interpreting text as markup or code.
    held = page.do(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'set' }"
        " catch (e) { return e.name } })()"
    )
    assert held == "TypeError"
    blocked = page.do(
        "new Promise(done => { const s = document.createElement('script');"
        " s.textContent = 'window.pwned = 2'; document.head.append(s); done(window.pwned ?? 0) })"
        ".catch(e => e.name)"
    )
    assert blocked in {0, "TypeError"}
    # Positive control: in a page that interprets it as markup, it runs.
    page.go("about:blank")
    page.do(f"void (document.body.innerHTML = {json.dumps(PAYLOADS[1])})")
    page.until("window.pwned === 1")
    page.events.clear()  # what was tried above on purpose


def test_control_characters_and_long_lines_are_harmless(console: Console, signed_in: Page):
    page = signed_in
    name = console.open()
    code = (
        "import sys; w = sys.stdout.buffer.write\n"
        "w(b'A\\x1b[2J\\x1b[31mred\\x1b[0mB\\x1b]0;title\\x07C\\x1b]8;;http://x.example\\x1b\\\\D\\n')\n"
        "w(bytes(range(256)) + b'\\n')\n"
        "w('E\\u202eF\\u2066G\\u200bH\\n'.encode())\n"
        "w(b'one\\rtwo\\r\\nthree\\n')\n"
        "w(b'\\x1b]0;' + b'x' * 100 + b'\\nafter-an-open-sequence\\n')\n"
        "w(b'Y' * 3_000_000 + b'\\nlast\\n')\n"
    )
    status, _ = console.server.request("PUT", f"/v1/sessions/{name}/file?path=f.py", code.encode())
    assert status == 200
    console.run(name, "python3 -c 'print(1)' >/dev/null; python3 f.py | head -c 1000").join()
    run = console.run(name, "python3 f.py | tail -c 2900000")
    assert run.end["exited"]["returncode"] == 0
    choose(page, name)
    page.until("document.querySelectorAll('#runs tbody tr').length === 2")
    page.click("#runs tbody tr:last-child button.command")
    page.until(f"{SCREEN}.includes('ended with') && {SCREEN}.includes('AredBCD')")
    lines = page.do("[...document.querySelectorAll('#screen .stdout')].map(d => d.textContent)")
    assert lines[0] == "AredBCD"
    assert "E⟨U+202E⟩F⟨U+2066⟩G⟨U+200B⟩H" in lines
    at = lines.index("one")
    assert lines[at : at + 3] == ["one", "two", "three"]
    assert "after-an-open-sequence" in lines
    raw = page.do(SCREEN)
    assert not [c for c in raw if (ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160]
    assert "␀␁␂" in raw
    # One line of millions of characters.
    page.click("#runs tbody tr:first-child button.command")
    page.until(f"{SCREEN}.includes('last') && {SCREEN}.includes('ended with')")
    longest = page.do(
        "Math.max(...[...document.querySelectorAll('#screen div')].map(d => d.textContent.length))"
    )
    assert longest == 4000
    assert "more characters" in page.do("document.querySelector('#screen [data-cut]').dataset.cut")
    sizes = "(s => [s.scrollWidth <= s.clientWidth + 1, s.clientHeight < 600])"
    assert page.do(f"{sizes}(document.querySelector('#screen'))") == [True, True]


def test_a_million_lines_do_not_grow_the_page(console: Console, signed_in: Page):
    page = signed_in
    name = console.open()
    run = console.run(name, "while [ ! -e go ]; do sleep 0.02; done; seq 1000000")
    choose(page, name)
    page.until("document.querySelectorAll('#runs tbody tr').length === 1")
    assert console.server.request("PUT", f"/v1/sessions/{name}/file?path=go", b"")[0] == 200
    page.until(f"{SCREEN}.includes('ended with')")
    assert run.stdout == "".join(f"{n}\n" for n in range(1, 1000001))
    assert page.do(LINES) <= 2000
    assert page.do(f"{SCREEN}.length") <= 500_000
    assert page.do("document.getElementsByTagName('*').length") < 3000
    lines = page.do("[...document.querySelectorAll('#screen .stdout')].map(d => d.textContent)")
    assert lines[-1] == "1000000"
    assert lines[-1000:] == [str(n) for n in range(999001, 1000001)]
    # The last line is visible: the page keeps scrolling with the output.
    below = "(s => s.scrollHeight - s.scrollTop - s.clientHeight)"
    assert page.do(f"{below}(document.querySelector('#screen'))") < 40


def test_a_run_and_a_session_are_ended_from_the_page(console: Console, signed_in: Page):
    page = signed_in
    name = console.open()
    run = console.run(name, "echo begun; sleep 600")
    choose(page, name)
    page.until(f"{SCREEN}.includes('begun')")
    page.click("#runs tbody button.danger")
    page.until("document.getElementById('ask').open")
    assert "End run 1?" in page.do("document.getElementById('ask').innerText")
    page.click("#ask-no")
    page.until("!document.getElementById('ask').open")
    assert console.runs(name)[0]["end"] is None  # only asked
    page.click("#runs tbody button.danger")
    page.until("document.getElementById('ask').open")
    page.click("#ask-yes")
    page.until("document.querySelector('#runs tbody .badge').textContent === 'operator'")
    assert run.end["exited"]["reason"] == "operator"
    assert console.is_open(name)
    page.click(".title button.danger")
    page.until("document.getElementById('ask').open")
    page.click("#ask-yes")
    page.until("document.querySelector('.title .badges').innerText === 'ended'")
    assert eventually(lambda: not console.is_open(name))
    assert page.do("document.querySelector('.title button.danger').disabled")


# Another origin.

ATTACK = Path(__file__).with_name("attack.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[[str], str]]:
    """Serve an empty page on another port of this host, by address and by name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title><body>elsewhere")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield lambda host: f"http://{host}:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.spec("I3")
def test_a_page_of_another_origin_has_no_access(tab: Page, elsewhere: Callable[[str], str]):
    # The server requires no token, so that only the origin check protects it.
    with ServerProcess("--backend", "userns", "--drain", "0.1", token=False) as server:
        name = "ab" * 16
        assert server.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
        script = f"({ATTACK})({json.dumps(server.endpoint)}, {json.dumps(name)})"
        for host in ("127.0.0.1", "localhost"):
            tab.go(elsewhere(host))
            found = tab.do(script)
            assert found["read"] == found["run"] == found["import"] == "TypeError", found
            assert found["socket"] == "refused"
            assert found["frame"] in {"nothing", "SecurityError"}
        assert server.metric("sandbox_runs_started_total") == 0
        assert server.metric("sandbox_sessions_opened_total") == 1
        # Positive control: the same script in the server's own page does all of it.
        tab.go(f"{server.endpoint}/console/")
        tab.until("!document.getElementById('console').hidden")  # no token, no question
        found = tab.do(script)
        tab.go("about:blank")
        assert (found["read"], found["run"], found["import"]) == (200, 200, True)
        assert found["socket"] == "open"
        assert server.metric("sandbox_runs_started_total") >= 2


# A red square of 3 by 2 pixels.
PNG = (
    "import struct, zlib\n"
    "def chunk(kind, data):\n"
    "    whole = kind + data\n"
    "    return struct.pack('>I', len(data)) + whole + struct.pack('>I', zlib.crc32(whole))\n"
    "def png(width, height):\n"
    "    rows = (b'\\0' + b'\\xff\\0\\0' * 3) * 2\n"
    "    head = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)\n"
    "    return (b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', head) +\n"
    "            chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))\n"
    "class Picture:\n"
    "    def __init__(self, data): self.data = data\n"
    "    def __repr__(self): return 'as text'\n"
    "    def _repr_png_(self): return self.data\n"
)


@contextlib.contextmanager
def context_of(console: Console) -> Iterator[tuple[str, sync.Context]]:
    """Open a session with a context over the server; yield the name of the session too."""
    server = console.server
    before = {s["session"] for s in server.get_json("/v1/console")["sessions"]}
    with (
        sync.remote.session(endpoint=server.endpoint, token=server.token) as session,
        session.context() as ctx,
    ):
        after = {s["session"] for s in server.get_json("/v1/console")["sessions"]}
        (name,) = after - before
        yield name, ctx


@pytest.mark.spec("K7")
def test_contexts_and_their_cells_appear(console: Console, signed_in: Page):
    page = signed_in
    with context_of(console) as (name, ctx):
        ctx.run(PNG + "x = 20")
        ctx.run("print('before'); display(Picture(png(3, 2))); print('after'); x * 2 + 2")
        ctx.run("def f():\n    raise KeyError('gone')\nf()")
        ctx.run("1", network_mode="allowlist", network_allowlist=["allowed.example"])
        ctx.set(secret="not-recorded")
        choose(page, name)
        page.until("document.querySelectorAll('#runs tbody tr').length === 6")
        rows = page.do("[...document.querySelectorAll('#runs tbody tr')].map(r => r.innerText)")
        assert "context 1 · cell 4 · network allowlist" in rows[1]
        assert "raised KeyError" in rows[2]
        assert "context 1 · cell 2" in rows[3]
        assert "python" in rows[5]
        assert "not-recorded" not in page.do("document.body.innerText")
        page.click("#runs tbody tr:nth-child(4) button.command")
        page.until("document.querySelector('#screen canvas')?.dataset.drawn === 'yes'")
        page.until(f"{SCREEN}.includes('ended with')")
        shown = page.do(
            "[...document.querySelectorAll('#screen > div')].map(d => [d.className, d.textContent])"
        )
        kinds = [kind for kind, _ in shown]
        assert (kinds[0], kinds[1], kinds[-2:]) == ("code", "stdout", ["result", "note"])
        assert kinds.count("picture") == 1
        assert [text for kind, text in shown if kind == "stdout"] == ["before", "after"]
        assert shown[-2][1] == "42"
        pixel = (
            "[...document.querySelector('#screen canvas').getContext('2d')"
            ".getImageData(1, 1, 1, 1).data]"
        )
        assert page.do(pixel) == [255, 0, 0, 255]
        page.click("#runs tbody tr:nth-child(3) button.command")
        page.until("document.querySelector('#screen .error') !== null")
        assert "KeyError: 'gone'" in page.do("document.querySelector('#screen .error').textContent")


@pytest.mark.spec("K7")
def test_hostile_cells_are_text(console: Console, signed_in: Page):
    """Code, output, results of every type, names and messages of exceptions."""
    page = signed_in
    hostile = "".join(PAYLOADS)
    code = f"""
P = {hostile!r}
class Shown:
    def __repr__(self): return P
    def _repr_html_(self): return P
    def _repr_svg_(self): return P
    def _repr_markdown_(self): return P
class Html:
    def _repr_mimebundle_(self, **_): return {{'text/html': P, P: P}}
print(P); display(Shown(), Html())
display(Picture(P.encode())); display(Picture(png(10**6, 10**6))); display(Picture(png(3, 2)[:60]))
raise type(P, (Exception,), {{}})(P)
"""
    with context_of(console) as (name, ctx):
        ctx.run(PNG)
        result = ctx.run(code)
        assert result.error.value == hostile, "positive control: it was executed"
        assert [shown.html for shown in result.results][:2] == [hostile, hostile]
        choose(page, name)
        page.until("document.querySelectorAll('#runs tbody tr').length === 3")
        page.click("#runs tbody tr:first-child button.command")
        page.until(f"{SCREEN}.includes('ended with')")
        text = page.do(SCREEN)
        assert text.count(PAYLOADS[0]) >= 5
        assert "cannot be drawn" in text
        found = page.do("document.querySelectorAll('#detail :is(script, img, svg, iframe)').length")
        assert found == 0
        assert page.do("document.querySelectorAll('#screen canvas').length") == 0
        assert page.do("window.pwned") is None
