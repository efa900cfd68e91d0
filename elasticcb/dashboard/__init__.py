"""The live dashboard of a job: a separate process that queries the master, keeps the job's history, and serves
browsers."""
