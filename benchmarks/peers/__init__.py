"""The sides of `benchmarks.side_by_side`: one process each, in the environment that its library needs."""
