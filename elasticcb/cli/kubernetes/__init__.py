"""Commands for jobs on Kubernetes."""
