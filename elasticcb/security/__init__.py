"""Who may take part in a job: its token, and certificates."""
