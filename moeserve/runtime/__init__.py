"""Together and in time: ranks, steps, epochs, the coordinator, and the front door."""
