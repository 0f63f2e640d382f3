"""`python -m twoscale`: the same as the command `twoscale`, and what torchrun starts."""

import os
import sys

from twoscale.cli.main import main

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Everything is written and the process group is closed. Leave without the interpreter's teardown: gloo's and FSDP2's
        # threads are now and then destroyed in an order that aborts a process which has done all its work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
