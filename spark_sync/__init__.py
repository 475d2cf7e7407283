"""The Spark sync job: a thin host of the router."""
