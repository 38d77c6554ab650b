"""Lets the tests of this folder import the values they share: `builders` and `world`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
