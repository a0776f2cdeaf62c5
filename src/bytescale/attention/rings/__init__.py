"""Keys, values and their gradients on their way between the members of a group."""
