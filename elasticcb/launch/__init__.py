"""The process that starts the others, on top of all rooms."""
