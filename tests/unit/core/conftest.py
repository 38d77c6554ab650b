"""Lets the tests of this folder import the values they share: `builders`, `world` and the like."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
