"""A sandbox inside a task's own pod: no second pod, no deployment.

python on_device_in_a_task.py
flyte run --local on_device_in_a_task.py both
"""

import flyte

from union import sandbox as sb

# userns: an ordinary pod.
userns_env = flyte.TaskEnvironment(name="sandboxed-userns", image=sb.base_sandbox_image)

# bwrap: the same image, in a pod with the rights that bubblewrap needs.
bwrap_env = flyte.TaskEnvironment(
    name="sandboxed-bwrap",
    image=sb.base_sandbox_image,
    pod_template=flyte.PodTemplate().allow_nested_sandboxing(),
    depends_on=[userns_env],
)


@userns_env.task
async def in_user_namespaces() -> str:
    """Run a command with userns, in any pod."""
    async with sb.on_device.session(backend="userns") as sbx:
        return await sbx.run_code("print('hello from', 'userns')")


@bwrap_env.task
async def in_bubblewrap() -> str:
    """Run a command with bubblewrap, in a pod of the template above."""
    async with sb.on_device.session(backend="bubblewrap") as sbx:
        return await sbx.run_code("print('hello from', 'bubblewrap')")


@bwrap_env.task
async def both() -> str:
    """Run both tasks in sequence."""
    return await in_user_namespaces() + await in_bubblewrap()


if __name__ == "__main__":
    print(flyte.run(both).outputs()[0], end="")
