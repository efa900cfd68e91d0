"""How the processes of a job call each other."""
