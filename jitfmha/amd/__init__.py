"""What only AMD GPUs need: trees of code objects, the HIP runtime, the launcher, the compiler."""
