"""The VisualDL side of mlflow_tokens."""
