"""Steps in TensorFlow: the model's own, compiled."""
