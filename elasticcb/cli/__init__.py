"""The `elasticcb` command; one subcommand per file. See docs/cli.md."""
