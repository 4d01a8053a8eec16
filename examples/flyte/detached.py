"""A sandbox that outlives a block of code: kept, waited for, and closed by hand.

python detached.py
flyte run --local detached.py serve_user_session --user_id jo
"""

from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="long-running-service",
    image=flyte.Image.from_debian_base().with_pip_packages("unionai-sandbox[remote]"),
)


@env.task
async def serve_user_session(user_id: str) -> str:
    """Greets one user from a sandbox."""
    sbx = await sb.session(timeout=timedelta(minutes=30))
    greeting = f"hello {user_id}"  # your own preparations, while the sandbox starts
    await sbx  # wait until it can be addressed; raises early if it never will be
    try:
        result = await sbx.exec(["echo", greeting], check=True)
        return result.stdout.strip()
    finally:
        await sbx.close()  # the owner's close ends the run


if __name__ == "__main__":
    print(flyte.run(serve_user_session, user_id="jo").outputs()[0])
