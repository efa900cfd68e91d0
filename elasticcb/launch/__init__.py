"""The fork process, which starts the others; on top of all rooms."""
