"""What an architecture couples, declared as data: one file per `model_type`, found by its name."""
