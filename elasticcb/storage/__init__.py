"""Folders and files, here and on remote file systems."""
