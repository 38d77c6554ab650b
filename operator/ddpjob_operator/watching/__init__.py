"""kopf, and nothing else: its settings, its watches and whether they live. Events become keys in the queue here."""
