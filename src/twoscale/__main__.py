"""`python -m twoscale`: the same as the command `twoscale`."""

import sys

from twoscale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
