"""`elasticcb zoo`: a folder of model files, and its image."""
