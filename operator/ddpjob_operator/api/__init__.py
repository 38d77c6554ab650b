"""The DDPJob API: what a user may write (`spec`), what the operator answers (`status`), and the CRD generated
from both.
"""

GROUP = "training.ddpjob.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DDPJob"
PLURAL = "ddpjobs"
SINGULAR = "ddpjob"
SHORT_NAME = "ddp"
