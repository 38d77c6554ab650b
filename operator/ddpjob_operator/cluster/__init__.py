"""A DDPJob on a cluster: the cache of what was seen, the pass over one job, the calls that carry out a plan.

Decides nothing about a job, and does not import kopf.
"""
