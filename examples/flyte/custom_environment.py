"""Sessions in a custom environment; deploy it first with deploy_my_sandboxes.py.

python custom_environment.py
flyte run --local custom_environment.py main
"""

import flyte
from my_sandboxes import data_sandbox

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="agent",
    image=sb.image_with_sandbox(flyte.Image.from_debian_base()),
)


@env.task
async def main() -> str:
    """Return a variable of the environment from inside a sandbox."""
    async with await sb.session(environment=data_sandbox) as sbx:
        return await sbx.run_code("import os; print(os.environ['GREETING'], 'from', os.getcwd())")


if __name__ == "__main__":
    print(flyte.run(main).outputs()[0], end="")
