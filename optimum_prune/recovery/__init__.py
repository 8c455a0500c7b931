"""LoRA through PEFT on pruned models: what pruning cost is learned back, and what it achieved stays."""
