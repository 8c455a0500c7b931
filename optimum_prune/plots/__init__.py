"""Pictures of what pruning did: what was kept, by which scores, and what it cost and saved."""
