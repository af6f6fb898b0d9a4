"""What `bench.service.chaos` does to a service from outside, and the callers that look on."""
