"""Evaluation beside training: checkpoints are evaluated as they come. See docs/evaluation_beside_training.md."""
