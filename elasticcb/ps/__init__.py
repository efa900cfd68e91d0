"""Parameter servers: they hold the weights and the optimizer's slots, and apply gradients."""
