"""What the pod reports while it runs: /status and /metrics, computed from the heartbeats of its ranks."""
