"""ElasticCB from Python: `Cluster`, and `fit`, `evaluate` and `predict` with a temporary cluster."""
