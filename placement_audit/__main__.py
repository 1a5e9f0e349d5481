"""``python -m placement_audit``: the form that torchrun can start."""

import sys

from placement_audit.cli import main

if __name__ == "__main__":
    sys.exit(main())
