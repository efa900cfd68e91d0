"""Local and remote folders and files."""
