"""Where snapshots go: MLflow, VisualDL."""
