"""ElasticCB from Python: `Cluster`, and `fit`, `evaluate` and `predict` on a cluster of their own."""
