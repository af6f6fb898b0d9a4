"""What `bench/service/serve_on.py` consists of."""
