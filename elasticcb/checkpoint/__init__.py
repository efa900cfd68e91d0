"""Persistent state of a model: the files of snapshots."""
