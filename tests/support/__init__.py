"""What tests of several tiers share: waiting for a condition, free ports, small volumes."""
