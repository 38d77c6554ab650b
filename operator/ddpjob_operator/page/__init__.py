"""`ddpjob dashboard`: jobs as web pages, from a shared folder or a cluster. It reads, and changes nothing.

`folder.py` and `cluster.py` read a source into the values of `values.py`. `job_view.py`, `list_view.py`, `charts.py`,
`ranks.py`, `links.py` and `timeline.py` are pure: they say what a page shows. `server.py` answers requests.
"""
