"""Access to a job: its token and certificates."""
