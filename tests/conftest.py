"""What holds for every test."""

import torch

# Bit-for-bit comparisons need one order of summation, and on small tensors one thread is faster than two that spin.
torch.set_num_threads(1)
