"""The contract of the doors and its clients; a model server can install only this (numpy and grpcio)."""
