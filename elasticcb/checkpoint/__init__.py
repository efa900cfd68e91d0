"""What of a job lasts: the files of a checkpoint, and of a server's recovery."""
