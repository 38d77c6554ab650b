"""What a run leaves to read in logs/<job> on the volume: losses, events and metrics, written by rank 0.

Writing never stops training and never waits in its thread. Nothing here decides anything about training.
"""
