"""Device lanes at a rank's door: callers that bring rows by memory, and the passes that they announce."""
