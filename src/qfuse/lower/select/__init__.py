"""The kernel protocol, and the selection of the cheapest kernel for a problem."""
