"""The main functions of a job's processes."""
