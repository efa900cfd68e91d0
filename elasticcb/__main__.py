"""`python -m elasticcb` is the `elasticcb` command."""

import sys

from elasticcb.process.import_path import leave_out_current_folder

if __name__ == "__main__":
    leave_out_current_folder()
    from elasticcb.cli.main import main

    sys.exit(main())
