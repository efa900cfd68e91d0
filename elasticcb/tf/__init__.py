"""TensorFlow utilities besides Keras: tensors and arrays, variables, compiled functions."""
