"""Lines of the synchronous face are not asynchronous."""

from union.sandbox import sync


async def main(process: sync.SandboxProcess) -> None:
    async for line in process.iter_stdout_lines():  # mistake
        print(line)
