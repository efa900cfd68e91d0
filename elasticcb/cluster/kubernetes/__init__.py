"""Workers and parameter servers as pods of Kubernetes."""
