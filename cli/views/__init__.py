"""Pure views: what the commands show, as text and as rows with stable keys."""
