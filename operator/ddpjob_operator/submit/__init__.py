"""From a folder or a script on this machine to a job: packs code, checks the job, sends both to a cluster.

The check is what the operator, the API server and the built-in trainer would say, without any of them. What asks a job
that is there belongs in `follow`, what runs one here in `local`, printing in `cli`.
"""
