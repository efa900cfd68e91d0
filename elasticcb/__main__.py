"""`python -m elasticcb` is the `elasticcb` command."""

import sys

from elasticcb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
