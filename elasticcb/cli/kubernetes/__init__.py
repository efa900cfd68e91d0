"""The commands of jobs on Kubernetes."""
