"""The master: the task queue, the evaluation rounds, the roster, and the thin service around them."""
