"""Persistent state of a job: the files of checkpoints, and recovery files of servers."""
