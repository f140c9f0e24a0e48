"""What a kernel of the registry is, and how one is selected."""
