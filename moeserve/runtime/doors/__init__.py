"""gRPC endpoints: the front door, the doors of lanes, and what both check and answer."""
