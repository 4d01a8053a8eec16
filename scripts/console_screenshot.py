"""Take the screenshot of the web console for the guide, with a real server and a real browser.

Run it as ``python -m scripts.console_screenshot [FILE]`` after the page has changed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.console.browser import Browser
from tests.console.conftest import Console
from tests.servers import ServerProcess

TARGET = Path(__file__).resolve().parents[1] / "docs/images/console.png"
OPTIONS = ("--backend", "userns", "--work-dir", "/tmp/sandbox-work", "--drain", "0.1")
ALLOWED = ["*.example.com", "127.0.0.1:8081"]

TRAINING = """python3 -u -c '
import sys, time
print("loading 60,000 rows from data.csv")
for epoch in range(1, 100):
    loss = 1.9 / epoch ** 0.6
    print(f"epoch {epoch:2}  loss {loss:.4f}  accuracy {1 - loss / 3:.3f}")
    if epoch % 4 == 0:
        print(f"warning: learning rate lowered to {0.1 / epoch:.4f}", file=sys.stderr)
    time.sleep(0.25)
'"""


def main(target: Path) -> None:
    """Open a few sessions, run commands, take the screenshot, and end everything."""
    with ServerProcess(*OPTIONS, bind="127.0.0.1:8080") as server, Browser() as browser:
        console = Console(server)
        idle, agent = console.open(), console.open(network_mode="open")
        console.run(idle, "ls -la").join()
        console.run(agent, "while true; do date; sleep 1; done")
        main_one = console.open(network_mode="allowlist", network_allowlist=ALLOWED, timeout_s=3600)
        for command in (
            "seq 60000 > data.csv; wc -l data.csv",
            "python3 -m unittest discover -s tests",
            "getent hosts files.internal; getent hosts tracker.example.org; exit 1",
            "python3 -c 'sum(i * i for i in range(8_000_000))'",
        ):
            console.run(main_one, command).join()
        training = console.run(main_one, TRAINING)
        page = browser.page()
        page.size(1240, 1172)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.go(f"{console.url}#token={server.token}")
        page.until("document.querySelectorAll('#runs tbody tr').length === 5")
        for _ in range(9):
            time.sleep(1)
            console.run(idle, "sleep 0.2; cat /proc/self/status").join()
        page.picture(target)
        print(f"{target}: {target.stat().st_size // 1024} KiB")
        console.clear()
        training.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
