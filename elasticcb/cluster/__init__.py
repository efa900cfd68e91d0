"""Who starts and stops the processes of a job. The master plans; a backend carries out and observes."""
