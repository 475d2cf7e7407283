"""Helpers of tests: worlds, fakes, and programs that tests run."""
