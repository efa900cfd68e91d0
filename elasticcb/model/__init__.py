"""The user's model, its weights, losses and metrics, and its input pipeline."""
