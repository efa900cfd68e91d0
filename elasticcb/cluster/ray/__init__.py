"""Workers and parameter servers as processes on the nodes of a Ray cluster."""
