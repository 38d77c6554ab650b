"""From how pods ended to what follows: first cause, diagnosis, restart rules, budget, nodes to avoid.

Nothing here creates or deletes a pod.
"""
