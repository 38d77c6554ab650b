"""The command `ddpjob`, also installed as `kubectl-ddpjob`: what kubectl cannot do for a DDPJob,
and nothing that it can.
"""
