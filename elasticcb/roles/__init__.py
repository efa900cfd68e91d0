"""What each process of a job runs."""
