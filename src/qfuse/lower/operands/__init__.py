"""What kernels share: checks of operands, and constants in the layout that kernels read."""
