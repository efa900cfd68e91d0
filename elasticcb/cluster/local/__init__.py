"""Workers and parameter servers as processes on this machine, and the process that forks them."""
