"""What the benches of the hop share: a checkpoint, callers in processes of their own, the step in process."""
