"""The front door's contract and its clients; a model server can install only this (numpy and grpcio)."""
