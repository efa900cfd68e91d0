"""Which parameter server holds which dense weights, and which rows of embedding tables."""
