"""The kernel families, one module each: what a family serves, and how its launcher is made."""
