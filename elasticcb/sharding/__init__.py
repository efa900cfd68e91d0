"""Which parameter server holds what: dense weights, and rows of embedding tables."""
