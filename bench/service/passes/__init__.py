"""Device lanes and passes: what a step costs by them, and that they are right for long."""
