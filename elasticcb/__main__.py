"""`python -m elasticcb` is the `elasticcb` command."""

from elasticcb.cli.main import main

if __name__ == "__main__":
    main()
