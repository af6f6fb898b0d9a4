"""What a rank runs before it serves, so that no step waits for a compiler, a recording or pinned memory."""
