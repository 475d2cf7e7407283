"""Record of the level topics and messages of an earlier version, for tests of compatibility."""
