"""A DDPJob on this machine: the actions of `core.plan` carried out with processes, ports and a folder instead of
a cluster.

Data goes one way: `runner` builds an `Observed` from what it sees, asks `plan`, and carries the plan out.
`children` is what the job owns, `container` is what a pod's processes run under, `processes` starts and watches it,
`environment` turns a pod's manifest into a command and its environment, `assignment` tells a pod of its place in the
gang, `initializer` puts data on the volume before, `volume` is the shared folder, `display` is what a person sees.
"""
