"""What concerns one process: its logs, its signals, its limits, and what it counts of itself."""
