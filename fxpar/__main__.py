"""``python -m fxpar`` is the ``fxpar`` command."""

import sys

from fxpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
