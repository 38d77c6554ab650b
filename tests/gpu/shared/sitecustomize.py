"""Python imports this at its start: two pods of one machine share its GPU.

NCCL refuses two ranks on one device of one host, so each pod's rank is on a host of its own (NCCL_HOSTID), and they
meet over sockets, as those of two nodes do.
"""

import os

if "LOCAL_RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = f"node-{os.environ.get('DDPJOB_NODE_RANK', '0')}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
