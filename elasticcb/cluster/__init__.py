"""Cluster backends start and stop the processes of a job. The master plans; a backend executes and observes."""
