"""What the head and the ranks say to each other: streams, messages and the values in them."""
