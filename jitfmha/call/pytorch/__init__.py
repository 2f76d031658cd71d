"""What PyTorch asks of a function: operators, autograd, autocast, vmap, FLOP counts."""
