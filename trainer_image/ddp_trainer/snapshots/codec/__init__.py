"""From live objects to the bytes of a snapshot and back. It touches no directory: that is `trust`."""
