"""The live page of a job: a process of its own asks the master, keeps the job's past, and serves it to browsers."""
