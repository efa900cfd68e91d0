"""What is used of TensorFlow besides Keras: tensors and arrays, variables, compiled functions."""
