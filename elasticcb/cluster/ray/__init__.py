"""Workers and parameter servers as processes of the nodes of a Ray cluster."""
