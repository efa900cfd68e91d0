"""The TensorFlow backend: compiles the model's own steps."""
