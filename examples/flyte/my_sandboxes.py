"""A custom environment: image, size, isolation; custom_environment.py uses it."""

import flyte

from union import sandbox as sb

data_sandbox = sb.SandboxEnvironment(
    name="data-sandbox",
    image=sb.base_sandbox_image.with_pip_packages("pandas"),
    resources=flyte.Resources(cpu="2", memory="4Gi"),
    env_vars={"GREETING": "hello"},
    sandbox_mode="userns",
    runtime="container",
    description="Sandboxes with pandas",
)
