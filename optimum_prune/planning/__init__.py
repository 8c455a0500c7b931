"""What a run will keep and save, before it: from shapes alone."""
