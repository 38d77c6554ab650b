"""The command `ddpjob`, also installed as `kubectl-ddpjob`. It does only what kubectl cannot do."""
