"""The Kubernetes objects that a job is made of, as plain JSON, and the administrator's bounds on them.

No decision about when to create or delete one.
"""
