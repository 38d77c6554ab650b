"""From a folder or a script on this machine to a job: packs code, writes the job, sends both to a cluster.

What asks a job that is there belongs in `follow`, what runs one here in `local`. Printing belongs in `cli`.
"""
