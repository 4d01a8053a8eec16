"""A sandbox inside a task's own pod: no second pod, no deployment of ours.

python on_device_in_a_task.py
flyte run --local on_device_in_a_task.py both
"""

import flyte

from union import sandbox as sb

# userns: an ordinary pod.
userns_env = flyte.TaskEnvironment(name="sandboxed-userns", image=sb.base_sandbox_image)

# bwrap: the same image, in a pod that lets bubblewrap do its work.
bwrap_env = flyte.TaskEnvironment(
    name="sandboxed-bwrap",
    image=sb.base_sandbox_image,
    pod_template=flyte.PodTemplate().allow_nested_sandboxing(),
    depends_on=[userns_env],
)


@userns_env.task
async def in_user_namespaces() -> str:
    """Needs nothing of its pod."""
    async with sb.on_device.session(backend="userns") as sbx:
        return await sbx.run_code("print('hello from', 'userns')")


@bwrap_env.task
async def in_bubblewrap() -> str:
    """Needs the pod template above."""
    async with sb.on_device.session(backend="bubblewrap") as sbx:
        return await sbx.run_code("print('hello from', 'bubblewrap')")


@bwrap_env.task
async def both() -> str:
    """One after the other."""
    return await in_user_namespaces() + await in_bubblewrap()


if __name__ == "__main__":
    print(flyte.run(both).outputs()[0], end="")
