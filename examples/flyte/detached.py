"""A sandbox without `async with`: created, awaited and closed explicitly.

python detached.py
flyte run --local detached.py serve_user_session --user_id jo
"""

from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="long-running-service",
    image=sb.image_with_sandbox(flyte.Image.from_debian_base()),
)


@env.task
async def serve_user_session(user_id: str) -> str:
    """Greet one user from a sandbox."""
    sbx = await sb.session(timeout=timedelta(minutes=30))
    greeting = f"hello {user_id}"  # Your own preparations, while the sandbox starts.
    await sbx  # Wait for its address; raises early if the run fails.
    try:
        result = await sbx.exec(["echo", greeting], check=True)
        return result.stdout.strip()
    finally:
        await sbx.close()  # The owner's close() ends the run.


if __name__ == "__main__":
    print(flyte.run(serve_user_session, user_id="jo").outputs()[0])
