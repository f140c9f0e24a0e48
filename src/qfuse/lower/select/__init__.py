"""The kernel protocol, and the loop that selects the cheapest kernel of a problem."""
