"""What connects this package with others; each module is imported by who needs it."""
