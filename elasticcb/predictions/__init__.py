"""What a model predicts, as columns and as files."""
