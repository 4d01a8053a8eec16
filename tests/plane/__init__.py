"""A local stand-in for the Flyte 2 control plane. For tests only.

The unmodified ``flyte`` SDK talks to it over loopback with the protocol it speaks to a cluster,
because it stands on the server stubs that ``flyteidl2`` ships. An action is a process: the real
``a0`` with the arguments and the environment that its pod would have.

It proves how we use the SDK (deploy, look-up, named runs, watch, logs, abort, sub-actions,
results) and what our code does in the life of a run, the unpleasant parts included (`faults`).

It proves nothing about Flyte's own scheduler, storage or security, and nothing about pods: there
is no image, no security context, no network between pods, and no login. With the executor of
`pods` the pods are real, the control plane is still this one.

- `plane`      starts and stops it; what a test holds
- `state`      what is known of tasks, runs and actions, and who waits for news
- `tasks`, `cluster`, `dataproxy`, `runs`, `actions`   one service each
- `store`      the object store, as much of S3 as the SDK uses
- `podspec`    an action as the pod that Kubernetes would be asked for
- `executor`   the life of an action: phases, time limits, attempts, abort
- `processes`  pods that are processes on this machine
- `pods`       pods that are pods
- `faults`     what can be made to go wrong
"""
