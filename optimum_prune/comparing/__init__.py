"""Several ways to prune one model, measured side by side."""
