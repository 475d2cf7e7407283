"""What the commands show, as text and as rows with stable keys; nothing is printed here."""
