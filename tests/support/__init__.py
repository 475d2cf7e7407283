"""What tests share: worlds, fakes, and programs that tests run."""
