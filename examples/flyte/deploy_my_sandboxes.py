"""The module for `flyte deploy`: environments at module level.

flyte deploy deploy_my_sandboxes.py data_sandbox_env
"""

from my_sandboxes import data_sandbox

data_sandbox_env = data_sandbox.task_env
