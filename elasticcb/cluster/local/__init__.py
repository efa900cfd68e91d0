"""Workers and parameter servers as processes of this machine, and the process that forks them."""
