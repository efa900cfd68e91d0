"""The process that runs batches: data in, gradients out."""
